"""Copies of buffers that are to be updated in place are found in the plan that the builder logs, in every profile."""

from collections.abc import Sequence

import pytest

from tide_export.bundle.network_spec import NetworkSpec, Tensor
from tide_export.plans.build import _copied_bytes
from tide_export.plans.worker import BuildLog
from tide_export.runtime.tensorrt.flavours import TENSORRT, warn_of_copies

ALIASES = {"present.0.key": "past_key_values.0.key", "new_exit_states": "exit_states"}
Layer = tuple[str, Sequence[str], Sequence[str]]  # name, and the tensors that it reads and writes


def tensors(names: Sequence[str], profile: int, style: str) -> str:
    """As TensorRT for RTX 1.7 lists them, or TensorRT ("device")."""
    of_profile = f" [profile {profile}]" if profile else ""
    where = "Location: Device, " if style == "device" else ""
    return ", ".join(
        f"{{ Name: {name}{of_profile}, {where}Dimensions: [1,2,64,16], Datatype: Half }}" for name in names
    )


def copied(layers: Sequence[Layer], profiles: int = 1, style: str = "") -> dict[str, int]:
    log = BuildLog()
    for profile in range(profiles):
        for name, reads, writes in layers:
            reading, writing = tensors(reads, profile, style), tensors(writes, profile, style)
            log.messages.append(
                f"Name: {name}, LayerType: kgen, Inputs: [{reading}], Constants: [], Outputs: [{writing}], StreamId: 0"
            )
    return log.built(ALIASES)["copied"]


KEYS_IN_PLACE: list[Layer] = [
    ("scatter", ["key", "present.0.key"], ["present.0.key"]),
    ("to attention's layout", ["present.0.key"], ["arranged"]),  # after the update: of attention
]
EXIT_IN_PLACE: list[Layer] = [("TideExit", ["states", "exit_states"], ["new_exit_states"])]


@pytest.mark.parametrize("style", ["", "device"])
@pytest.mark.parametrize("profiles", [1, 3])
@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([*KEYS_IN_PLACE, *EXIT_IN_PLACE], {}),
        ([("scatter", ["key", "past_key_values.0.key"], ["past_key_values.0.key"]), *EXIT_IN_PLACE], {}),
        (
            [
                *KEYS_IN_PLACE,
                ("Reformatting CopyNode for Input Tensor 3 to TideExit", ["exit_states"], ["Reformatted"]),
                ("TideExit", ["states", "Reformatted"], ["new_exit_states"]),
            ],
            {"new_exit_states": 2},  # the plugin carries over what the first copy holds
        ),
        (
            [
                ("copy", ["past_key_values.0.key"], ["other"]),
                ("scatter", ["key", "other"], ["other"]),
                ("copy", ["other"], ["present.0.key"]),
                *EXIT_IN_PLACE,
            ],
            {"present.0.key": 2},
        ),
        ([("scatter", ["key", "other"], ["present.0.key"]), *EXIT_IN_PLACE], {"present.0.key": 1}),
    ],
)
def test_what_is_read_or_written_elsewhere_is_a_copy(
    layers: list[Layer], profiles: int, style: str, expected: dict[str, int]
) -> None:
    assert copied(layers, profiles, style) == expected


def test_the_bytes_are_one_warning_and_one_entry_for_each_network(caplog: pytest.LogCaptureFixture) -> None:
    buffer = Tensor("float16", ("batch", 2, 64, 16))
    spec = NetworkSpec("segment_00", {}, {"present.0.key": buffer, "new_exit_states": buffer})
    count = _copied_bytes(spec, {"present.0.key": 2, "new_exit_states": 1})
    assert count == 3 * 2 * 64 * 16 * 2
    warn_of_copies(TENSORRT, {spec.name: count})
    assert caplog.messages == [
        "TensorRT copies buffers that segment_00 is to update in place: 12288 bytes in a run over one sequence"
    ]
