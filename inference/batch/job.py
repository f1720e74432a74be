"""Options for loading the model, equal on this machine and on the workers of a cluster."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from ..models.config_folder import digest_of_config
from ..models.options import ModelOptions
from .rows import Kind, OutputColumns

if TYPE_CHECKING:
    from ..models.predictor import Predictor


@dataclass(frozen=True, slots=True)
class Job:
    """A model and all options that its answers depend on. ``threads`` are those of a forward pass, because their number
    may change the order of sums. None leaves ``device`` and ``threads`` to torch."""

    model: str
    options: ModelOptions
    threads: int | None = None

    def with_defaults_of_torch(self) -> Job:
        """The job with torch's choice of device and threads filled in."""
        import torch

        device = self.options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return Job(self.model, replace(self.options, device=device), self.threads or torch.get_num_threads())

    def load_predictor(self) -> Predictor:
        """Load the model. Sets the number of torch threads of this process."""
        import torch

        from ..models.predictor import load_with_options, name_of

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return load_with_options(self.model, name_of(self.model), self.options)

    def digest(self) -> str:
        """All that answers depend on, except the weights and the input."""
        import torch

        return json.dumps(
            {
                **asdict(self.options),
                "threads": self.threads,
                "beside": digest_of_config(self.model, config=self.options.reading.config),
                "torch": torch.__version__,
            },
            sort_keys=True,
        )


def columns_of(predictor: Predictor, top: int) -> OutputColumns:
    from ..models.tensors import Tensors

    outputs = {spec.name for spec in predictor.outputs}
    kinds: dict[str, Kind] = {"probabilities": "label", "text": "text", "embedding": "embedding"}
    is_free = isinstance(predictor.task, Tensors)
    kind = "outputs" if is_free else next(kind for name, kind in kinds.items() if name in outputs)
    return OutputColumns(kind, predictor.labels, top)
