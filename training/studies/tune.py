"""``python -m training.studies.tune``: one run per learning rate, started by Ray Tune.

For Tune's schedulers and searches, write a ``tune.Tuner`` of your own around ``launch``, as :func:`main` does. Tune's
record of the trials is in ``OUT/tune``.
"""

from __future__ import annotations

from ckpt_tools.signals import killed_by_interrupts

with killed_by_interrupts():
    import os
    from dataclasses import replace
    from typing import Any

    import click

    from ckpt_tools.errors import UsageError

    from ..config.command_line import CONTEXT_BEFORE_OPTIONS, Command, check_installed, config_of, parsed
    from ..config.train_config import TrainConfig
    from ..loop.stopping import interruptible

RECORD = "tune"


def runs_of(config: TrainConfig, rates: tuple[float, ...]) -> dict[float, TrainConfig]:
    """The run of each learning rate, below ``config.out``. Raises ``UsageError``."""
    if len(set(rates)) < max(2, len(rates)):
        raise UsageError("give --learning-rate before -- at least twice, with different values")
    if config.launcher != "ray":
        raise UsageError("Ray Tune needs --launcher ray")
    for name in ("storage", "resume", "export"):
        if getattr(config, name) is not None:
            raise UsageError(f"--{name} is for one run, and these are {len(rates)}: leave it out")
    return {rate: replace(config, learning_rate=rate, out=config.out / f"learning-rate-{rate:g}") for rate in rates}


@click.command(cls=Command, context_settings=CONTEXT_BEFORE_OPTIONS)
@click.option(
    "--learning-rate", "rates", type=float, multiple=True, required=True, help="Learning rate of a trial; repeatable."
)
@click.option("--at-once", type=click.IntRange(min=1), default=1, help="Number of concurrent trials.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(rates: tuple[float, ...], at_once: int, options: tuple[str, ...]) -> None:
    """Train once per learning rate with OPTIONS, the options of the run, given after --; list the best trial first."""
    config = config_of(parsed(options))
    runs = runs_of(config, rates)
    check_installed(config)
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # Tune would handle Ctrl-C, and wait for its trials
    with interruptible(lambda: "start again with another --out"):
        # The imports below load torch, which takes seconds, so options are checked first.
        from ray import tune

        from ..launchers import cluster
        from ..launchers.checks import check_before_start
        from ..launchers.failures import RunFailedError

        for run in runs.values():
            check_before_start(run)
        # A trial takes one CPU beside those of its workers.
        with cluster(at_once * (config.num_workers + 1)):
            found = tune.Tuner(
                tune.with_parameters(_trial, runs=runs),
                param_space={"learning_rate": tune.grid_search(list(rates))},
                tune_config=tune.TuneConfig(metric="accuracy", mode="max", max_concurrent_trials=at_once),
                run_config=tune.RunConfig(name=RECORD, storage_path=str(config.out), verbose=1),
            ).fit()
        if found.errors:
            raise RunFailedError(f"a trial failed, see {config.out / RECORD}: {found.errors[0]}")
    for trial in sorted((each.metrics or {} for each in found), key=lambda figures: -figures["accuracy"]):
        said = "learning rate {learning_rate:<8g} accuracy {accuracy:.4f}  loss {loss:.4f}  {checkpoint}"
        click.echo(said.format(**trial))


def _trial(chosen: dict[str, float], runs: dict[float, TrainConfig]) -> None:
    from ray import tune

    from ..launchers import launch

    result = launch(runs[chosen["learning_rate"]])
    figures: dict[str, Any] = {"accuracy": result.accuracy or 0.0, "loss": result.history[-1].mean_loss}
    tune.report(chosen | figures | {"checkpoint": result.checkpoint})


if __name__ == "__main__":
    main()
