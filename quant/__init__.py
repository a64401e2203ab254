"""Number formats and the files that hold them. A new type is a file here and a line in TYPES."""

from edgellm.quant.block import QuantType
from edgellm.quant.floats import BF16, F16, F32
from edgellm.quant.iq1 import IQ1_M, IQ1_S
from edgellm.quant.iq2 import IQ2_S, IQ2_XS, IQ2_XXS
from edgellm.quant.iq3 import IQ3_S, IQ3_XXS
from edgellm.quant.iq4_nl import IQ4_NL
from edgellm.quant.iq4_xs import IQ4_XS
from edgellm.quant.mxfp4 import MXFP4
from edgellm.quant.q2_k import Q2_K
from edgellm.quant.q3_k import Q3_K
from edgellm.quant.q4_0 import Q4_0
from edgellm.quant.q4_1 import Q4_1
from edgellm.quant.q4_k import Q4_K
from edgellm.quant.q5_0 import Q5_0
from edgellm.quant.q5_1 import Q5_1
from edgellm.quant.q5_k import Q5_K
from edgellm.quant.q6_k import Q6_K
from edgellm.quant.q8_0 import Q8_0
from edgellm.quant.tq import TQ1_0, TQ2_0

__all__ = ["TYPES", "QuantType", "UnsupportedType", "by_name"]

TYPES: dict[int, QuantType] = {
    quant_type.id: quant_type
    for quant_type in (
        F32(),
        F16(),
        BF16(),
        Q4_0(),
        Q4_1(),
        Q5_0(),
        Q5_1(),
        Q8_0(),
        Q2_K(),
        Q3_K(),
        Q4_K(),
        Q5_K(),
        Q6_K(),
        IQ4_NL(),
        IQ4_XS(),
        MXFP4(),
        IQ3_S(),
        IQ3_XXS(),
        IQ2_S(),
        IQ2_XS(),
        IQ2_XXS(),
        IQ1_M(),
        IQ1_S(),
        TQ1_0(),
        TQ2_0(),
    )
}

_BY_NAME = {quant_type.name: quant_type for quant_type in TYPES.values()}


class UnsupportedType(ValueError):
    """A number format that edgellm does not know."""

    def __init__(self, asked: str) -> None:
        super().__init__(f"number format {asked} is not supported; supported: {supported()}")


def supported() -> str:
    """The supported types as a list to show, "F32 F16 …"."""
    return " ".join(str(quant_type) for quant_type in TYPES.values())


def by_name(name: str) -> QuantType:
    """The type of that name, in either case ("q4_k", "Q4_K"); UnsupportedType if unknown."""
    try:
        return _BY_NAME[name.lower()]
    except KeyError:
        raise UnsupportedType(name) from None
