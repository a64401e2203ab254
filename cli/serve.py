"""`edgellm serve`: a model for programs that speak OpenAI's HTTP."""

import math
from pathlib import Path
from typing import Annotated

import typer

from edgellm.api_keys import api_keys
from edgellm.cli import _model
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
from edgellm.errors import EdgeLLMError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
        typer.Option("--api-key-file", help="API keys, one on each line; also in LLAMA_API_KEY."),
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
    ctx_size: CtxSize = 0,
    parallel: Annotated[
        int, typer.Option("-np", "--parallel", min=1, help="Sequences that run together.")
    ] = 8,
    max_queue: Annotated[
        int, typer.Option("--max-queue", min=0, help="Requests that may wait.")
    ] = 64,
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
) -> None:
    """Serve a model over HTTP: /v1/chat/completions, /v1/completions, /v1/embeddings and more.

    \b
    Examples:
      edgellm serve model.gguf
      curl localhost:8080/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello"}]}'
    """
    if metrics_compat not in (None, "vllm"):
        raise EdgeLLMError(f"--metrics-compat can be vllm, not {metrics_compat!r}.")
    if not math.isfinite(timeout):
        raise EdgeLLMError(f"--timeout must be seconds, not {timeout}.")
    if slot_save_path is not None and not slot_save_path.is_dir():
        raise EdgeLLMError(f"{slot_save_path} (--slot-save-path) is not a folder.")
    keys = api_keys(api_key_file, "LLAMA_API_KEY")
    if host not in LOOPBACK and not keys and not insecure:
        raise EdgeLLMError(
            f"Serving {host} lets other machines in: name keys with --api-key-file or "
            "LLAMA_API_KEY (or accept it with --insecure)."
        )
    path = _model.locate(_model.pick(model_argument, model))
    try:
        from edgellm.server.run import serve
    except ImportError as error:
        raise EdgeLLMError(
            f"The server needs {error.name}: pip install 'edgellm[server]'."
        ) from None
    from edgellm.cli._engine import load
    from edgellm.conversation import template_of

    llm = load(
        path, ctx_size, threads, chat_template, parallel=parallel, cpu_mask=cpu_mask,
        cache_types=(cache_type_k, cache_type_v),
        overrides={
            "max_num_batched_tokens": max_num_batched_tokens, "prefill_share": prefill_share,
            "cache_tokens": cache_tokens, "prefix_cache": not no_prefix_cache,
            "host_cache_bytes": cache_ram << 20, "block_size": block_size,
        },
    )  # fmt: skip
    with llm:
        has_template = chat_template is not None or llm.chat_template is not None
        serve(
            llm,
            model=alias or path.stem,
            template=template_of(llm, chat_template) if has_template else None,
            address=(host, port),
            keys=keys,
            hosts=tuple(allowed_host or ()),
            origins=tuple(cors_origin or ()),
            max_queue=max_queue,
            timeout=timeout,
            strict=strict,
            vllm_metrics=metrics_compat == "vllm",
            slot_dir=slot_save_path,
            allow_special=allow_special,
            max_connections=max_connections,
            max_connections_per_client=max_connections_per_client,
            say=say,
        )
