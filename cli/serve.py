"""`edgellm serve`: a model for programs that speak OpenAI's HTTP."""

import math
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from edgellm.api_keys import api_keys
from edgellm.cli import _model
from edgellm.cli._lora import with_lora
from edgellm.cli._offload import OffloadFlags, with_offload
from edgellm.cli._options import (
    CacheTypeK,
    CacheTypeV,
    CpuMask,
    CtxSize,
    Model,
    ModelFlag,
    Threads,
)  # fmt: skip
from edgellm.cli._output import say
from edgellm.cli._speculation import SpeculationFlags, with_speculation
from edgellm.errors import EdgeLLMError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CONTEXT = 4096  # tokens that a model is taken to need room for, where no context is asked for


@with_speculation()
@with_offload
@with_lora
def command(
    model_argument: Model = None,
    model: ModelFlag = None,
    host: Annotated[
        str, typer.Option("--host", envvar="LLAMA_ARG_HOST", help="Address to listen at.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option("--port", envvar="LLAMA_ARG_PORT", min=0, max=65535, help="0: any free one."),
    ] = 8080,
    alias: Annotated[
        str | None, typer.Option("-a", "--alias", help="Name that the model answers to.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file",
                     help="API keys, one on each line, and what each may ask for: KEY "
                     "max_tokens=N concurrency=N; also in LLAMA_API_KEY."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option("--allowed-host", help="A further name of this server.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", help="Origin of web pages that may ask, exactly."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without an API key.")
    ] = False,
    models_dir: Annotated[
        Path | None,
        typer.Option("--models-dir", metavar="DIR", show_default=False,
                     help="Load models of this folder when requests name them."),
    ] = None,
    models_max: Annotated[
        int, typer.Option("--models-max", min=1, help="Models loaded at once, as memory allows.")
    ] = 4,
    idle_unload: Annotated[
        float | None,
        typer.Option("--idle-unload", min=0, metavar="SECONDS", show_default=False,
                     help="Unload a model that nobody used for so long."),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", metavar="NAME", show_default=False,
                     help="A model of the folder that is never unloaded; the one on the command "
                     "line is none either."),
    ] = None,
    ctx_size: CtxSize = 0,
    parallel: Annotated[
        int, typer.Option("-np", "--parallel", min=1, help="Sequences that run together.")
    ] = 8,
    max_queue: Annotated[
        int | None,
        typer.Option("--max-queue", min=0, show_default=False,
                     help="Requests that may wait; else three for each that runs."),
    ] = None,
    max_queue_tokens: Annotated[
        int, typer.Option("--max-queue-tokens", min=1, help="Tokens of prompts that may wait.")
    ] = 1 << 20,
    queue_timeout: Annotated[
        float | None,
        typer.Option("--queue-timeout", min=0.001, metavar="SECONDS", show_default=False,
                     help="The longest that a request waits to be begun."),
    ] = None,
    first_token_timeout: Annotated[
        float | None,
        typer.Option("--first-token-timeout", min=0.001, metavar="SECONDS", show_default=False,
                     help="The longest to its first token."),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens", min=1, help="Tokens of a step; none: what fits its time."
        ),
    ] = None,
    prefill_share: Annotated[
        float,
        typer.Option(
            "--prefill-share",
            min=0.01,
            max=1.0,
            help="Of a step's tokens, what prompts may take beside answers.",
        ),
    ] = 1.0,
    cache_tokens: Annotated[
        int | None,
        typer.Option("--cache-tokens", min=1, help="Room for keys and values of all sequences."),
    ] = None,
    cache_ram: Annotated[
        int,
        typer.Option(
            "-cram", "--cache-ram", min=0, help="MiB beside it for what it has to give away."
        ),
    ] = 0,
    block_size: Annotated[
        int, typer.Option("--block-size", help="Tokens of keys and values that lie together.")
    ] = 32,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt anew.")
    ] = False,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    threads: Threads = -1,
    cpu_mask: CpuMask = None,
    chat_template: Annotated[
        str | None, typer.Option("--chat-template", help="Name or file of another template.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("-to", "--timeout", min=1, help="Seconds that a request may take.")
    ] = 3600.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse requests with unknown fields.")
    ] = False,
    max_connections: Annotated[
        int, typer.Option("--max-connections", min=1, help="Connections that may be open.")
    ] = 1000,
    max_connections_per_client: Annotated[
        int | None,
        typer.Option("--max-connections-per-client", min=1, help="The same, of one address."),
    ] = None,
    slot_save_path: Annotated[
        Path | None,
        typer.Option("--slot-save-path", help="Folder for caches that /slots/ID saves."),
    ] = None,
    allow_special: Annotated[
        bool,
        typer.Option(
            "--allow-special", help="Take control tokens in messages and prompts as such."
        ),
    ] = False,
    metrics_compat: Annotated[
        str | None,
        typer.Option("--metrics-compat", help="vllm: metrics also under vLLM's names."),
    ] = None,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Each line of the log as a JSON object.")
    ] = False,
    *,
    offload: OffloadFlags,
    adapters: dict[str, Any],
    speculation: SpeculationFlags,
) -> None:  # fmt: skip
    """Serve a model, or those of a folder, over HTTP: /v1/chat/completions, /v1/completions,
    /v1/embeddings and more; a page to chat at /.

    \b
    Examples:
      edgellm serve model.gguf
      curl localhost:8080/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello"}]}'
      edgellm serve --models-dir models --idle-unload 600
    """
    if metrics_compat not in (None, "vllm"):
        raise EdgeLLMError(f"--metrics-compat can be vllm, not {metrics_compat!r}.")
    if not math.isfinite(timeout):
        raise EdgeLLMError(f"--timeout must be seconds, not {timeout}.")
    if slot_save_path is not None and not slot_save_path.is_dir():
        raise EdgeLLMError(f"{slot_save_path} (--slot-save-path) is not a folder.")
    for origin in cors_origin or ():
        if not re.fullmatch(r"https?://[^/*\s]+", origin):
            raise EdgeLLMError(
                f"--cors-origin {origin!r} is no origin: one is as https://page.example, without "
                "a path, and is matched exactly."
            )
    keys = api_keys(api_key_file, "LLAMA_API_KEY")
    if host not in LOOPBACK and not keys and not insecure:
        raise EdgeLLMError(
            f"Serving {host} lets other machines in: name keys with --api-key-file or "
            "LLAMA_API_KEY (or accept it with --insecure)."
        )
    name = _model.pick(model_argument, model)
    if models_dir is not None and not models_dir.is_dir():
        raise EdgeLLMError(f"{models_dir} (--models-dir) is not a folder.")
    if models_dir is not None and speculation.uses_model:
        raise EdgeLLMError(
            "A draft model (-md) is of one model's family, and --models-dir serves several: leave "
            "one of them out (--spec-type lookup needs no draft model)."
        )
    if models_dir is not None and adapters:
        raise EdgeLLMError(
            "An adapter (--lora) is of one model, and --models-dir serves several: leave one of "
            "them out."
        )
    try:
        from edgellm.server.run import Settings, serve
    except ImportError as error:
        raise EdgeLLMError(
            f"The server needs {error.name}: pip install 'edgellm[server]'."
        ) from None
    from edgellm.cli._engine import load
    from edgellm.conversation import template_of
    from edgellm.engine import AsyncLLM
    from edgellm.server import models as served
    from edgellm.server.logs import start_logging
    from edgellm.server.safety import read_caps
    from edgellm.server.service import STALL_SECONDS, WAITING_PER_SEAT, Service, log
    from edgellm.turns import Turns

    start_logging(log_json)
    tell = log.info if log_json else say
    turns = Turns() if models_dir is not None else None  # they share the cores

    def load_service(name: str, path: Path) -> Service:
        llm = load(
            path, ctx_size, threads, chat_template, parallel=parallel, cpu_mask=cpu_mask,
            tell=tell if log_json else None, offload=offload, speculation=speculation,
            cache_types=(cache_type_k, cache_type_v),
            overrides={
                "max_num_batched_tokens": max_num_batched_tokens, "prefill_share": prefill_share,
                "cache_tokens": cache_tokens, "prefix_cache": not no_prefix_cache,
                "host_cache_bytes": cache_ram << 20, "block_size": block_size,
                **adapters,
            },
        )  # fmt: skip
        try:
            has_template = chat_template is not None or llm.chat_template is not None
            return Service(
                AsyncLLM(llm, stall_seconds=STALL_SECONDS, turns=turns), name,
                template_of(llm, chat_template) if has_template else None,
                max_queue=WAITING_PER_SEAT * parallel if max_queue is None else max_queue,
                max_queue_tokens=max_queue_tokens,
                queue_seconds=queue_timeout, first_token_seconds=first_token_timeout,
                request_seconds=timeout, slot_dir=slot_save_path, allow_special=allow_special,
            )  # fmt: skip
        except BaseException:
            llm.close()
            raise

    def cost(path: Path) -> int:
        return served.cost(path, ctx_size or _CONTEXT, cache_type_k, cache_type_v)

    models = served.Models(
        load_service, cost, models_dir, idle_seconds=idle_unload,
        most=models_max if models_dir is not None else None,
    )  # fmt: skip
    if name is not None or models_dir is None:
        path = _model.locate(name)
        models.add(alias or path.stem, path)
    for pinned in pin or ():
        models.pin(pinned)
    keys, caps = read_caps(keys)
    serve(
        models,
        Settings(
            address=(host, port), keys=keys, caps=caps, hosts=tuple(allowed_host or ()),
            origins=tuple(cors_origin or ()), strict=strict,
            vllm_metrics=metrics_compat == "vllm", max_connections=max_connections,
            max_connections_per_client=max_connections_per_client,
        ),
        tell,
    )  # fmt: skip
