"""One decoder for one device, declared by its config; Hugging Face folders. Sampling: `phalanx.model.generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.model.config import ModelConfig, RopeScaling
    from phalanx.model.decoder import Decoder
    from phalanx.model.huggingface import export_folder, import_folder, load_decoder
    from phalanx.model.logical_parameters import initialise
    from phalanx.model.shapes import flops_per_token, num_parameters, parameter_table

__all__ = [
    "Decoder",
    "ModelConfig",
    "RopeScaling",
    "export_folder",
    "flops_per_token",
    "import_folder",
    "initialise",
    "load_decoder",
    "num_parameters",
    "parameter_table",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "phalanx.model.config": ["ModelConfig", "RopeScaling"],
        "phalanx.model.decoder": ["Decoder"],
        "phalanx.model.huggingface": ["export_folder", "import_folder", "load_decoder"],
        "phalanx.model.logical_parameters": ["initialise"],
        "phalanx.model.shapes": ["flops_per_token", "num_parameters", "parameter_table"],
    },
)
