"""Progress: silent but for one log line where nobody watches, a bar on stderr where somebody does."""

import io
import logging
import sys

import pytest

from tide_export.common import progress
from tide_export.common.progress import duration, quiet_loggers, stage


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_one_line_in_the_log_and_nothing_on_the_streams(caplog, capsys):
    with caplog.at_level(logging.INFO, logger="tide_export"), stage("counting", total=3) as advance:
        advance(1)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("counting ... done in ")
    assert capsys.readouterr() == ("", "")


def test_a_long_stage_says_in_the_log_how_much_time_is_left(caplog, monkeypatch):
    clock = iter([0.0, 0.0, 10.0, 40.0, 60.0, 100.0, 100.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    with caplog.at_level(logging.INFO, logger="tide_export"), stage("counting", total=10) as advance:
        for amount in (1, 3, 1, 5):
            advance(amount)
    assert caplog.messages == ["counting: 40 %, 60 seconds left", "counting ... done in 100.0 s"]


def test_a_span_of_time_in_words():
    given = (0.2, 1, 40, 100, 3600, 9000)
    assert [duration(seconds) for seconds in given] == [
        "1 second",
        "1 second",
        "40 seconds",
        "2 minutes",
        "60 minutes",
        "2.5 hours",
    ]


def test_a_stage_that_fails_is_not_reported_as_done(caplog):
    with caplog.at_level(logging.INFO, logger="tide_export"), pytest.raises(KeyError), stage("counting"):
        raise KeyError
    assert not caplog.messages


def test_bar_on_a_terminal(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with stage("counting", total=2) as advance:
        advance(2)
        with stage("nested") as inner:
            inner(1)
    assert "counting" in terminal.getvalue()
    assert "100 %" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_loggers_are_quiet_while_the_context_is_open(caplog):
    logger = logging.getLogger("tests.noisy")
    logger.setLevel(logging.INFO)
    with quiet_loggers(logging.ERROR, logger.name):
        logger.warning("advice")
        logger.error("failure")
    logger.warning("again")
    assert caplog.messages == ["failure", "again"]
