"""``python -m training.launchers.slurm``: script of a SLURM job that saves before its time limit.

The script starts one rank per task with ``srun``, with torchrun's environment variables and ``--resume auto``. SLURM
sends SIGTERM some minutes before the time limit; the ranks save and exit with code 75, and the script requeues the job.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from typing import Any

import click

from ckpt_tools.credentials import without_secrets
from ckpt_tools.errors import UsageError

from ..config import PACKAGE
from ..config.command_line import CONTEXT_BEFORE_OPTIONS, Command, config_of, parsed
from ..config.options import RESUME_AUTO
from ..config.train_config import TrainConfig
from ..loop.stopping import EXIT_CODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Resources and limits of the job. Raises ``UsageError`` for invalid numbers."""

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

# The ranks rendezvous on the first node of the job.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=1

srun --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  exec "$@"' rank {command}
code=$?

# The run saved and stopped. A cancelled job is not RUNNING, and is not requeued.
if [ $code -eq {stopped} ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit $code
"""


def script(job: Job, config: TrainConfig, python: str) -> str:
    """Script for ``sbatch``. Raises ``UsageError`` if SLURM cannot start the run again."""
    if config.resume not in (None, RESUME_AUTO):
        raise UsageError(f"--resume is {RESUME_AUTO} in a job: it starts again with the same command line")
    ranks = replace(config, launcher="torchrun", resume=RESUME_AUTO, max_restarts=0)
    command = shlex.join([python, "-m", PACKAGE, *ranks.to_args()])
    if without_secrets(command) != command:
        raise UsageError(
            f"a job script holds no credentials, and the options have some: {command}; set them in the environment of "
            "the job, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    directives = "\n".join(f"#SBATCH {each}" for each in job.directives(config.num_workers))
    return SCRIPT.format(directives=directives, command=command, stopped=EXIT_CODE)


@click.command(cls=Command, context_settings=CONTEXT_BEFORE_OPTIONS)
@click.option("--nodes", type=int, default=1, help="Number of nodes; the workers are divided among them.")
@click.option("--gpus-per-node", type=int, help="GPUs per node.")
@click.option("--time", default="24:00:00", help="Time limit per run; the job requeues and resumes.")
@click.option("--partition", help="Partition, passed to sbatch.")
@click.option("--account", help="Account, passed to sbatch.")
@click.option("--name", default="train", help="Job name.")
@click.option(
    "--signal-seconds", type=int, default=300, help="Seconds before the time limit at which the job saves and stops."
)
@click.option("--python", default=sys.executable, help="Python interpreter on the nodes.", show_default="this one")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(python: str, options: tuple[str, ...], **values: Any) -> None:
    """Print an sbatch script that trains with OPTIONS, the options of the run, given after --."""
    click.echo(script(Job(**values), config_of(parsed(options)), python), nl=False)


if __name__ == "__main__":
    main()
