"""What edgellm.ray_serve says to Ray, and a replica without it; the argument is a model."""

import asyncio
import sys

from edgellm.errors import EdgeLLMError
from edgellm.ray_serve import REPLICA, Settings, app, deployment


def refused(kind: type[Exception], word: str, **settings: object) -> None:
    try:
        deployment("model.gguf", **settings)
    except kind as error:
        assert word in str(error), error
    else:
        raise AssertionError(settings)


refused(EdgeLLMError, "num_replicas", num_replicas=2, autoscaling_config={"max_replicas": 3})
refused(ValueError, "modle", modle="x")
refused(ValueError, "parallel", parallel=0)

asked = {
    "model": "m.gguf",
    "parallel": "4",
    "max_queue": "2",
    "allowed_host": "a.org,b.org",
}
settings = Settings.model_validate(asked)
assert settings.allowed_host == ("a.org", "b.org")
facts = app(settings)._bound_deployment._deployment_config
assert facts.num_replicas == 1
assert facts.max_ongoing_requests > 4 + 2  # so that the replica can refuse what is too much
assert facts.backpressure_config.status_code == 429 and facts.backpressure_config.retry_after_s > 0
assert facts.graceful_shutdown_timeout_s > 30

scaled = deployment("m.gguf", parallel=4, autoscaling_config={"min_replicas": 1, "max_replicas": 3})
scaling = scaled._bound_deployment._deployment_config.autoscaling_config
assert (scaling.max_replicas, scaling.target_ongoing_requests) == (3, 4)


async def replica(**settings: object) -> object:
    """As Ray makes one."""
    kind = REPLICA.func_or_class
    made = kind.__new__(kind)
    await made.__init__(Settings(model=sys.argv[1], parallel=1, **settings))
    return made


async def health() -> None:
    try:
        await replica()
    except EdgeLLMError as error:
        assert "api_key_file" in str(error), error
    else:
        raise AssertionError("other machines were let in without a key")
    made = await replica(insecure=True)
    await made.check_health()
    await made.models.loaded[0].service.engine.aclose()
    try:
        await made.check_health()
    except EdgeLLMError:
        print("ok")


asyncio.run(health())
