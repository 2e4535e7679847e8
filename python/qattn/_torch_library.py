"""The namespace of torch.ops.qattn, in which other files define operators."""

import torch

library = torch.library.Library("qattn", "DEF")
