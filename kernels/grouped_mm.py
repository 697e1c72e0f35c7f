"""torch's grouped matrix product, whose weight gradient is zero for experts without rows on every device.

    y[p] = x[p] w[e(p)]          dw[e] = sum over p of x[p]^T dy[p], an empty sum for an expert without rows

On compute capability 10 torch gives such experts a gradient of whatever lay in memory (pytorch issue 172439;
9.0 is right), which would train them on noise: there it is masked, at the cost of one more pass over it.
Without a gradient the product takes the weights themselves, which is how calibration recognizes them.

Letters: P rows, of which each expert's are contiguous; D features in, F out, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_mm(x_PD: Tensor, w_EDF: Tensor, end_E: Tensor) -> Tensor:
    """``y`` (P, F); rows from the last end on are garbage, in ``y`` and in the gradient of x. ``end_E``:
    int32, where each expert's rows end."""
    if torch.is_grad_enabled() and w_EDF.requires_grad:
        w_EDF = _with_rows(w_EDF, w_EDF.detach(), end_E)
    return F.grouped_mm(x_PD, w_EDF, offs=end_E)


def weight_gradient(x_PD: Tensor, dy_PF: Tensor, end_E: Tensor) -> Tensor:
    """``dw`` (E, D, F)."""
    dw_EDF = F.grouped_mm(x_PD.t(), dy_PF, offs=end_E)
    return _with_rows(dw_EDF, torch.zeros((), dtype=dw_EDF.dtype, device=dw_EDF.device), end_E)


def _with_rows(w_EDF: Tensor, otherwise: Tensor, end_E: Tensor) -> Tensor:
    """``w_EDF`` of experts that have rows, of the others what it is to be ``otherwise``, on a device that
    takes no care of that itself."""
    if not _is_wrong_where_empty(w_EDF.device):
        return w_EDF
    has_rows_E = end_E > F.pad(end_E[:-1], (1, 0))
    return torch.where(has_rows_E[:, None, None], w_EDF, otherwise)


def _is_wrong_where_empty(device: torch.device) -> bool:
    # Not get_device_capability, which a compiler cannot take for a constant.
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major == 10
