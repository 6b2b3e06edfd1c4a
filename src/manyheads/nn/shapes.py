"""The types of tensors with their shapes in signatures: jaxtyping's, where it is installed.

    from manyheads.nn.shapes import Float, Int
    def forward(tokens: Int[Tensor, "batch len"]) -> Float[Tensor, "batch len d_model"]: ...

The tests check these shapes at run time, and mypy and editors read them as plain tensors. Without jaxtyping they are
documentation only, so that the modules of `nn/` and the models need nothing but torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Bool", "Float", "Int"]

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ModuleNotFoundError:

        class _Unchecked:
            """`Float[Tensor, "batch len"]` is `Tensor`."""

            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Float = Int = _Unchecked
