"""``python -m training.studies.tune``: tunes the learning rate with Ray Tune.

Each trial is a complete run in its own folder below ``--out``, started by a worker of Tune. Tune's own record of the
trials is in ``OUT/tune``.
"""

from __future__ import annotations

from ckpt_tools.signals import killed_by_interrupts

with killed_by_interrupts():
    import os
    from dataclasses import asdict, dataclass, replace

    import click

    from ckpt_tools.errors import UsageError

    from ..config.command_line import CONTEXT_BEFORE_OPTIONS, Command, check_installed, config_of, parsed
    from ..config.train_config import TrainConfig
    from ..loop.stopping import interruptible

RECORD = "tune"


@dataclass(frozen=True, slots=True)
class Trial:
    """A finished run."""

    learning_rate: float
    accuracy: float
    loss: float
    checkpoint: str

    @property
    def line(self) -> str:
        return (
            f"learning rate {self.learning_rate:<8g} accuracy {self.accuracy:.4f}  loss {self.loss:.4f}  "
            f"{self.checkpoint}"
        )


def runs_of(config: TrainConfig, rates: tuple[float, ...]) -> list[TrainConfig]:
    """One run per learning rate, below ``config.out``. Raises ``UsageError``."""
    if len(set(rates)) < max(2, len(rates)):
        raise UsageError("give --learning-rate before -- at least twice, with different values")
    if config.launcher != "ray":
        raise UsageError("Ray Tune needs --launcher ray")
    for name in ("storage", "resume", "export"):
        if getattr(config, name) is not None:
            raise UsageError(f"--{name} is for one run, and these are {len(rates)}: leave it out")
    return [replace(config, learning_rate=rate, out=config.out / f"learning-rate-{rate:g}") for rate in rates]


def tuned(config: TrainConfig, rates: tuple[float, ...], at_once: int) -> list[Trial]:
    """Finished trials, the most accurate first. Raises ``CkptError``."""
    runs = runs_of(config, rates)
    check_installed(config)
    # The imports below load torch, which takes seconds, so options are checked first.
    from ray import tune

    from ..launchers import check_before_start, cluster
    from ..launchers.failures import RunFailedError

    for run in runs:
        check_before_start(run)
    # A trial takes one CPU beside those of its workers.
    with cluster(at_once * (config.num_workers + 1)):
        tuner = tune.Tuner(
            tune.with_parameters(_trial, runs={run.learning_rate: run for run in runs}),
            param_space={"learning_rate": tune.grid_search(list(rates))},
            tune_config=tune.TuneConfig(metric="accuracy", mode="max", max_concurrent_trials=at_once),
            run_config=tune.RunConfig(name=RECORD, storage_path=str(config.out), verbose=1),
        )
        found = tuner.fit()
    if found.errors:
        raise RunFailedError(f"a trial failed, see {config.out / RECORD}: {found.errors[0]}")
    trials = [Trial(**{name: each.metrics[name] for name in Trial.__dataclass_fields__}) for each in found]
    return sorted(trials, key=lambda trial: -trial.accuracy)


def _trial(chosen: dict[str, float], runs: dict[float, TrainConfig]) -> None:
    from ray import tune

    from ..launchers import launch

    run = runs[chosen["learning_rate"]]
    result = launch(run)
    tune.report(
        asdict(Trial(run.learning_rate, result.accuracy or 0.0, result.history[-1].mean_loss, result.checkpoint))
    )


@click.command(cls=Command, context_settings=CONTEXT_BEFORE_OPTIONS)
@click.option(
    "--learning-rate", "rates", type=float, multiple=True, required=True, help="Learning rate of a trial; repeatable."
)
@click.option("--at-once", type=click.IntRange(min=1), default=1, help="Number of concurrent trials.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(rates: tuple[float, ...], at_once: int, options: tuple[str, ...]) -> None:
    """Train once per learning rate with OPTIONS, the options of the run, given after --; list the best trial first."""
    # Tune would otherwise handle Ctrl-C and wait for its trials.
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    with interruptible(lambda: "start again with another --out"):
        trials = tuned(config_of(parsed(options)), rates, at_once)
    for trial in trials:
        click.echo(trial.line)


if __name__ == "__main__":
    main()
