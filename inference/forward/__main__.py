"""``ckpt-tools verify-forward`` (``python -m inference.forward``): compare what two models compute."""

from __future__ import annotations

from ckpt_tools.process.signals import use_default_interrupt

with use_default_interrupt():
    import json
    import sys
    from typing import TYPE_CHECKING, Any

    import click

    from ckpt_tools.errors import DifferenceError

    from ..common.errors import make_printable, report_errors
    from ..common.training_package import commands
    from ..models.options import MODEL_HEADINGS, TensorOptions, add_reading_options

if TYPE_CHECKING:
    from .report import ForwardReport

HEADINGS = {
    "Models": ("config", "model_key", "dequantize"),
    **{title: names for title, names in MODEL_HEADINGS.items() if title != "Model"},
    "Limits": ("max_kl", "max_difference"),
    "Running": ("device", "as_json", "help"),
}


@click.command(
    cls=commands.CheckedCommand,
    headings=HEADINGS,
    examples=("ckpt-tools verify-forward run/step-1000 model --config model",),
    context_settings={"show_default": True},
)
@click.argument("src", metavar="SRC")
@click.argument("dst", metavar="DST")
@add_reading_options
@click.option("--max-kl", type=float, default=0.025, help="Largest mean KL divergence of the logits; p95: 4 times it.")
@click.option("--max-difference", type=float, default=0.2, help="Largest relative difference of a layer's output.")
@click.option("--device", metavar="TEXT", help="torch device, e.g. cuda:1.  [default: first GPU, else CPU]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(src: str, dst: str, max_kl: float, max_difference: float, device: str | None, **given: Any) -> None:
    """Compare what the models of two checkpoints compute for the same inputs, layer by layer.

    For what no bits can prove: quantized weights, another library's layout. Models of transformers alone.
    --config is for what has no config.json beside it; the other options say how SRC is read. Exits with 6 if a limit
    is exceeded.
    """
    as_json = given.pop("as_json")
    with report_errors():
        from .compare import compare_forward
        from .report import DifferenceLimits

        reading, limits = TensorOptions.take_from(given), DifferenceLimits(max_kl, max_difference)
        report = compare_forward(src, dst, reading=reading, limits=limits, device=device)
        click.echo(json.dumps(report.to_json(), indent=2) if as_json else format_report(report))
        if not report.same:
            sys.exit(DifferenceError.exit_code)


def format_report(report: ForwardReport) -> str:
    """The table of layers, the logits, and what is beyond its limit."""
    width = max(len(each.layer) for each in report.layers)
    lines = [
        f"{report.model}, {report.inputs}; SRC twice: largest difference {report.noise:g}",
        f"{'':{width}}  largest   relative",
        *(f"{each.layer:{width}}  {each.largest:<8.3g}  {each.relative:.3g}" for each in report.layers),
        f"logits: KL mean {report.kl_mean:.3g}, p95 {report.kl_p95:.3g}; cosine {report.cosine:.6f}; "
        f"the same first choice {report.top_1:.1%}",
        *(f"too different in {each}" for each in report.reasons),
        *(["both behave alike, within the limits"] if report.same else []),
    ]
    return "\n".join(map(make_printable, lines))


if __name__ == "__main__":
    with use_default_interrupt():
        main()
