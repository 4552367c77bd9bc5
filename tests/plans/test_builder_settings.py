"""What the builder's process sets for all plans, on the builder of TensorRT for RTX, which needs no GPU."""

import pytest

from tide_export.plans.worker import configure

trt = pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
ALIASED = trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03


@pytest.fixture(scope="module")
def builder() -> "trt.Builder":
    return trt.Builder(trt.Logger())


def configured(builder: "trt.Builder", **job: object) -> "trt.IBuilderConfig":
    config = builder.create_builder_config()
    configure(trt, config, {"plugins": None, "compute_capabilities": (), **job})
    return config


@pytest.mark.parametrize("plugins", [None, "libtide_plugins.so"])
def test_a_plugin_updates_its_input_in_place(builder: "trt.Builder", plugins: str | None) -> None:
    """TensorRT asks a plugin for its aliases where this feature is on, and nowhere else."""
    assert configured(builder, plugins=plugins).get_preview_feature(ALIASED) == (plugins is not None)


def test_a_run_is_one_chain(builder: "trt.Builder") -> None:
    assert builder.create_builder_config().max_aux_streams != 0, "what the library does unasked"
    assert configured(builder).max_aux_streams == 0


def test_plans_are_for_the_gpus_of_the_job(builder: "trt.Builder") -> None:
    config = configured(builder, compute_capabilities=("8.9", "12.0"))
    found = [config.get_compute_capability(index) for index in range(config.num_compute_capabilities)]
    assert found == [trt.ComputeCapability.SM89, trt.ComputeCapability.SM120]
