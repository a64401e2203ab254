"""What this version runs, as a table generated from the registries; README holds a copy."""

from edgellm.kernels.cpu.report import kernel_for
from edgellm.models import architectures, title
from edgellm.quant import TYPES


def what_runs() -> str:
    """Markdown: architectures, and number formats with their size and kernel."""
    lines = ["| architecture | models |", "|---|---|"]
    lines += [f"| {name} | {title(name)} |" for name in architectures()]
    lines += [
        "",
        "| number format | bits a weight | kernel |",
        "|---|---|---|",
    ]
    for kind in TYPES.values():
        kernel, is_packed = kernel_for(kind.name)
        how = "packed" if is_packed else "decode, then dot"
        lines.append(f"| {kind} | {8 * kind.bytes / kind.block:g} | `{kernel}`, {how} |")
    return "\n".join(lines) + "\n"
