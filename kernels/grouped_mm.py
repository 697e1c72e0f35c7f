"""torch's grouped matrix product, with a weight gradient of zero for experts without rows on every device.

    y[p] = x[p] w[e(p)]          dw[e] = sum over p of x[p]^T dy[p], an empty sum for an expert without rows

On compute capability 10 torch leaves uninitialised memory in the gradient of such experts (pytorch issue
172439; 9.0 is correct), which would train them on noise. There the gradient is masked, at the cost of one
more pass over it. Without a gradient the product gets the weights themselves, because calibration
(spider/checkpoints/compress/quantize.py) recognises a matrix by its tensor.

Letters: P rows, contiguous for each expert; D features in, F out, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_mm(x_PD: Tensor, w_EDF: Tensor, end_E: Tensor) -> Tensor:
    """Return ``y`` (P, F), given the int32 ends of each expert's rows. Rows from the last end on are
    garbage, in ``y`` and in the gradient of x."""
    if torch.is_grad_enabled() and w_EDF.requires_grad:
        w_EDF = _with_rows(w_EDF, w_EDF.detach(), end_E)
    return F.grouped_mm(x_PD, w_EDF, offs=end_E)


def weight_gradient(x_PD: Tensor, dy_PF: Tensor, end_E: Tensor) -> Tensor:
    """Return ``dw`` (E, D, F)."""
    dw_EDF = F.grouped_mm(x_PD.t(), dy_PF, offs=end_E)
    return _with_rows(dw_EDF, torch.zeros((), dtype=dw_EDF.dtype, device=dw_EDF.device), end_E)


def _with_rows(w_EDF: Tensor, otherwise: Tensor, end_E: Tensor) -> Tensor:
    """Return ``w_EDF`` for experts with rows and ``otherwise`` for the others; ``w_EDF`` on devices whose
    gradient is correct."""
    if not _is_wrong_where_empty(w_EDF.device):
        return w_EDF
    has_rows_E = end_E > F.pad(end_E[:-1], (1, 0))
    return torch.where(has_rows_E[:, None, None], w_EDF, otherwise)


def _is_wrong_where_empty(device: torch.device) -> bool:
    # torch.compile does not treat get_device_capability as a constant.
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major == 10
