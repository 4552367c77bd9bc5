"""Builds a Ray Serve application of a bundle: the HTTP server, with one engine per replica.

serve run tide_export.serving.ray:application bundle=out/demo slots=8 max_replicas=4
"""

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from ray import serve

from tide_export.errors import ConfigError
from tide_export.serving.config import ServerConfig
from tide_export.serving.protocol import refusal

NAME = "tide"
CONTROL_REQUESTS = 4  # for /health, /ready and /metrics while the queue is full


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """Builds an application from the arguments of `serve run`.

    A replica receives at most as many requests as its slots and its queue hold. Ray Serve starts and ends replicas so
    that each has as many requests as slots, on average.

    Args:
        arguments: `bundle`, a folder that all machines have at this path; `min_replicas` (1), `max_replicas` (1);
            `num_cpus` (1) and `num_gpus` (0) of a replica; `provider`, `plugins` and, on CPUs, `threads` (`num_cpus`),
            as in `load`; fields of `ServerConfig`. `api_key` is by default TIDE_API_KEY, here or where the replica
            runs.

    Raises:
        ConfigError: an argument is missing, unknown or out of range.
    """
    options = dict(arguments)
    try:
        bundle = str(options.pop("bundle"))
        resources = {"num_cpus": float(options.pop("num_cpus", 1)), "num_gpus": float(options.pop("num_gpus", 0))}
        replicas = {name: int(options.pop(name, 1)) for name in ("min_replicas", "max_replicas")}
        loading: dict[str, Any] = {name: options.pop(name) for name in ("provider", "plugins") if name in options}
        if "threads" in options or (loading.get("provider", "cpu") in ("auto", "cpu") and not resources["num_gpus"]):
            loading["threads"] = int(options.pop("threads", max(resources["num_cpus"], 1)))
        config = ServerConfig(**{"api_key": os.environ.get("TIDE_API_KEY") or None} | options)
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
        ray_actor_options=resources,
    )(serve.ingress()(Replica))
    return deployment.bind(bundle, config, loading)


class Replica:
    """Runs one engine with its scheduler and application."""

    def __init__(self, bundle: str, config: ServerConfig, loading: Mapping[str, Any]) -> None:
        """Loads the bundle on the replica's machine; raises TideError if that fails."""
        from tide_export.runtime.engine import load
        from tide_export.serving.service import Service

        name = config.model_name or bundle.rstrip("/").rpartition("/")[2]
        self._service = Service(load(bundle, **loading), config.model_copy(update={"model_name": name}))

    def __serve_build_asgi_app__(self) -> Any:
        """Returns the application that Ray Serve runs."""
        from tide_export.serving.app import build_app

        return build_app(self._service)

    def check_health(self) -> None:
        """Raises RuntimeError if the scheduler has failed, so that Ray Serve replaces the replica."""
        if self._service.scheduler.closed:
            raise RuntimeError("the scheduler takes no more requests")
