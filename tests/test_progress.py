"""Progress: silent but for one log line where nobody watches, a bar on stderr where somebody does."""

import io
import logging
import sys

import pytest

from tide_export.progress import quiet_loggers, stage


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_one_line_in_the_log_and_nothing_on_the_streams(caplog, capsys):
    with caplog.at_level(logging.INFO, logger="tide_export"), stage("counting", total=3) as advance:
        advance(1)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("counting ... done in ")
    assert capsys.readouterr() == ("", "")


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
