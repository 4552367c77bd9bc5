"""Makes a Ray Serve application of a bundle: the HTTP server of `tide-export serve`, one engine a replica.

serve run tide_export.serving.ray:application bundle=out/demo slots=8 max_replicas=4
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from ray import serve

from tide_export.errors import ConfigError
from tide_export.serving.config import ServerConfig
from tide_export.serving.protocol import refusal

NAME = "tide"
CONTROL_REQUESTS = 4  # /health, /ready and /metrics, while a replica has all the requests that it takes


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """Makes an application; `serve run` gives it the arguments of its command line.

    A replica is sent as many requests as it has slots and places in its queue. Ray Serve starts and ends replicas so
    that each has as many as it has slots, on average.

    Args:
        arguments: `bundle`, a folder that all machines have at this path; `min_replicas` (1), `max_replicas` (1);
            `num_cpus` of a replica (1); `provider`, `threads` (`num_cpus`) and `plugins`, as of `load`; fields of
            `ServerConfig`.

    Raises:
        ConfigError: an argument is missing, unknown or out of range.
    """
    given = dict(arguments)
    try:
        bundle = str(given.pop("bundle"))
        cpus = float(given.pop("num_cpus", 1))
        threads = int(given.pop("threads", max(cpus, 1)))
        replicas = {name: int(given.pop(name, 1)) for name in ("min_replicas", "max_replicas")}
        loading: dict[str, Any] = {name: given.pop(name) for name in ("provider", "plugins") if name in given}
        config = ServerConfig(**given)
    except KeyError:
        raise ConfigError("bundle=FOLDER is missing") from None
    except ValidationError as error:
        raise ConfigError(str(refusal(error))) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    deployment = serve.deployment(
        name=NAME,
        max_ongoing_requests=config.slots + config.waiting + CONTROL_REQUESTS,
        autoscaling_config=replicas | {"target_ongoing_requests": config.slots},
        graceful_shutdown_timeout_s=config.drain_seconds,
        ray_actor_options={"num_cpus": cpus},
    )(serve.ingress()(Replica))
    return deployment.bind(bundle, config, loading | {"threads": threads})


class Replica:
    """One engine with its scheduler and the application around them."""

    def __init__(self, bundle: str, config: ServerConfig, loading: Mapping[str, Any]) -> None:
        """Loads the bundle, on the machine of the replica. Raises TideError."""
        from tide_export.runtime.engine import load
        from tide_export.serving.service import Service

        name = config.model_name or bundle.rstrip("/").rpartition("/")[2]
        self._service = Service(load(bundle, **loading), config.model_copy(update={"model_name": name}))

    def __serve_build_asgi_app__(self) -> Any:
        """The application, which Ray Serve runs."""
        from tide_export.serving.app import build_app

        return build_app(self._service)

    def check_health(self) -> None:
        """Asked by Ray Serve, which replaces a replica that raises. Raises RuntimeError: the scheduler has failed."""
        if self._service.scheduler.closed:
            raise RuntimeError("the scheduler takes no more requests")
