"""Exports Hugging Face causal LMs with early-exit routers to engines that skip layers.

`export` makes a bundle of a model and `load` runs it. Everything in `__all__` is the public API. All but the errors is
imported at first use, so that running a bundle needs only NumPy and one engine; making or checking a bundle needs the
`export` extra.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tide_export.common.version import __version__
from tide_export.errors import (
    AdaptError,
    BuildError,
    BundleError,
    CalibrationError,
    ConfigError,
    ConstraintError,
    DatasetError,
    DraftError,
    GenerationError,
    GraphError,
    HubError,
    ModelError,
    ProbeError,
    ProviderError,
    QueueFullError,
    RouterFileError,
    TideError,
    TraceError,
    TuneError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from tide_export.adaptation.config import AdaptConfig
    from tide_export.adaptation.flow import adapt
    from tide_export.calibration.config import TideConfig
    from tide_export.drafting.config import DraftConfig
    from tide_export.drafting.flow import draft
    from tide_export.model.structure import ModelStructure, register_adapter
    from tide_export.pipeline.calibrate import calibrate
    from tide_export.pipeline.flow import export
    from tide_export.pipeline.request import ExportRequest
    from tide_export.probing.flow import probe
    from tide_export.runtime.bench import bench
    from tide_export.runtime.config import GenerationConfig
    from tide_export.runtime.engine import Engine, load
    from tide_export.runtime.generation import Generation
    from tide_export.runtime.handle import RequestHandle
    from tide_export.runtime.scheduler import AuditConfig, Scheduler, SchedulerLimits
    from tide_export.tuning.tune import tune
    from tide_export.verify.validate import validate

__all__ = [
    "AdaptConfig",
    "AdaptError",
    "AuditConfig",
    "BuildError",
    "BundleError",
    "CalibrationError",
    "ConfigError",
    "ConstraintError",
    "DatasetError",
    "DraftConfig",
    "DraftError",
    "Engine",
    "ExportRequest",
    "Generation",
    "GenerationConfig",
    "GenerationError",
    "GraphError",
    "HubError",
    "ModelError",
    "ModelStructure",
    "ProbeError",
    "ProviderError",
    "QueueFullError",
    "RequestHandle",
    "RouterFileError",
    "Scheduler",
    "SchedulerLimits",
    "TideConfig",
    "TideError",
    "TraceError",
    "TuneError",
    "UnsupportedModelError",
    "__version__",
    "adapt",
    "bench",
    "calibrate",
    "draft",
    "export",
    "load",
    "probe",
    "register_adapter",
    "tune",
    "validate",
]

_MODULES = {
    "AdaptConfig": "adaptation.config",
    "AuditConfig": "runtime.scheduler",
    "DraftConfig": "drafting.config",
    "Engine": "runtime.engine",
    "ExportRequest": "pipeline.request",
    "Generation": "runtime.generation",
    "GenerationConfig": "runtime.config",
    "ModelStructure": "model.structure",
    "RequestHandle": "runtime.handle",
    "Scheduler": "runtime.scheduler",
    "SchedulerLimits": "runtime.scheduler",
    "TideConfig": "calibration.config",
    "adapt": "adaptation.flow",
    "bench": "runtime.bench",
    "calibrate": "pipeline.calibrate",
    "draft": "drafting.flow",
    "export": "pipeline.flow",
    "load": "runtime.engine",
    "probe": "probing.flow",
    "register_adapter": "model.structure",
    "tune": "tuning.tune",
    "validate": "verify.validate",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
