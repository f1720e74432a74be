"""``python -m training.launchers.slurm``: the script of a SLURM job that trains, stops in time, and goes on by itself.

The script starts one rank a task with ``srun``, gives it the environment that torchrun would, and runs the command
with ``--resume auto``. SLURM sends SIGTERM some minutes before the time is up; the ranks save and end with exit code
75, upon which the script puts the job back into the queue.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from typing import Any

import click

from ckpt_tools.errors import CkptError, UsageError

from ..config import PACKAGE
from ..config.command_line import CONTEXT_BEFORE_OPTIONS, Command, config_of, parsed
from ..config.options import RESUME_AUTO
from ..config.train_config import TrainConfig
from ..loop.stopping import EXIT_CODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What SLURM is asked for. Raises ``UsageError`` for numbers that do not fit."""

    nodes: int
    time: str
    signal_seconds: int
    gpus_per_node: int | None = None
    partition: str | None = None
    account: str | None = None
    name: str = "train"

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UsageError(f"--nodes is at least 1, not {self.nodes}")
        if self.signal_seconds < 1:
            raise UsageError(f"--signal-seconds is at least 1, not {self.signal_seconds}")

    def directives(self, num_workers: int) -> list[str]:
        """The options of ``sbatch``."""
        if num_workers % self.nodes:
            raise UsageError(f"--num-workers {num_workers} does not divide over --nodes {self.nodes}")
        given = {
            "job-name": self.name,
            "nodes": self.nodes,
            "ntasks-per-node": num_workers // self.nodes,
            "gpus-per-node": self.gpus_per_node,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "signal": f"TERM@{self.signal_seconds}",
            "open-mode": "append",
        }
        return ["--requeue", *(f"--{name}={value}" for name, value in given.items() if value is not None)]


SCRIPT = """\
#!/bin/bash
{directives}

# The first node of the job is where the ranks meet.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=1

srun --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  exec "$@"' rank {command}
code=$?

# Asked to stop, and saved. A job that was cancelled is not running any more, and stays so.
if [ $code -eq {stopped} ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit $code
"""


def script(job: Job, config: TrainConfig, python: str) -> str:
    """For ``sbatch``. Raises ``UsageError`` if the run is not one that SLURM can start again."""
    if config.resume not in (None, RESUME_AUTO):
        raise UsageError(f"--resume is {RESUME_AUTO} in a job: it starts again with the same command line")
    ranks = replace(config, launcher="torchrun", resume=RESUME_AUTO, max_restarts=0)
    command = shlex.join([python, "-m", PACKAGE, *ranks.to_args()])
    directives = "\n".join(f"#SBATCH {each}" for each in job.directives(config.num_workers))
    return SCRIPT.format(directives=directives, command=command, stopped=EXIT_CODE)


@click.command(cls=Command, context_settings=CONTEXT_BEFORE_OPTIONS)
@click.option("--nodes", type=int, default=1, help="Machines; the workers are dealt out over them.")
@click.option("--gpus-per-node", type=int, help="GPUs of each machine.")
@click.option("--time", default="24:00:00", help="Of one start; the job goes on in the next.")
@click.option("--partition", help="As sbatch has it.")
@click.option("--account", help="As sbatch has it.")
@click.option("--name", default="train", help="Of the job.")
@click.option("--signal-seconds", type=int, default=300, help="How long before its end the job saves and stops.")
@click.option("--python", default=sys.executable, help="The interpreter on the machines.", show_default="this one")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(python: str, options: tuple[str, ...], **values: Any) -> None:
    """Print a script for sbatch that trains with OPTIONS, those of the run itself, given after --."""
    try:
        click.echo(script(Job(**values), config_of(parsed(options)), python), nl=False)
    except CkptError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
