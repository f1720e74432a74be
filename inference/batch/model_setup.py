"""A model and its options, equal on this machine and on the workers of a cluster."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from ..models.config_folder import digest_config_folder
from ..models.options import ModelOptions
from .rows import AnswerKind, OutputColumns

if TYPE_CHECKING:
    from ..models.predictor import Predictor


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """A model and all options that its answers depend on. ``threads`` are those of a forward pass, because their number
    may change the order of sums. None leaves ``device`` and ``threads`` to torch."""

    model: str
    options: ModelOptions
    threads: int | None = None

    def with_torch_defaults(self) -> ModelSetup:
        """The setup with torch's choice of device and threads filled in."""
        import torch

        device = self.options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return ModelSetup(self.model, replace(self.options, device=device), self.threads or torch.get_num_threads())

    def load_predictor(self) -> Predictor:
        """Load the model. Sets the number of torch threads of this process."""
        import torch

        from ..models.predictor import load_with_options, name_model

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return load_with_options(self.model, name_model(self.model), self.options)

    def to_json(self) -> str:
        """All that answers depend on, except the weights and the input."""
        import torch

        return json.dumps(
            {
                **asdict(self.options),
                "threads": self.threads,
                "beside": digest_config_folder(self.model, config=self.options.reading.config),
                "torch": torch.__version__,
            },
            sort_keys=True,
        )


def choose_columns(predictor: Predictor, top: int) -> OutputColumns:
    from ..models.tensors import TensorTask

    outputs = {spec.name for spec in predictor.outputs}
    kinds: dict[str, AnswerKind] = {"probabilities": "label", "text": "text", "embedding": "embedding"}
    takes_tensors = isinstance(predictor.task, TensorTask)
    kind = "outputs" if takes_tensors else next(kind for name, kind in kinds.items() if name in outputs)
    return OutputColumns(kind, predictor.labels, top)
