"""Scripts of jobs that convert in parts: an array of SLURM, an indexed job of Kubernetes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
from click.core import ParameterSource

from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.part_number import PartNumber
from ckpt_tools.errors import UsageError

_SLURM = """#!/bin/bash
#SBATCH --job-name=ckpt-tools
#SBATCH --array=1-{count}
#SBATCH --cpus-per-task={cpus}
#SBATCH --mem={memory_mib}M
# A part that fails can be submitted again alone: sbatch --array=3 SCRIPT
{command} --part "$SLURM_ARRAY_TASK_ID/{count}"
"""

_KUBERNETES = """apiVersion: batch/v1
kind: Job
metadata:
  name: ckpt-tools
spec:
  completionMode: Indexed
  completions: {count}
  parallelism: {count}
  backoffLimitPerIndex: 3
  template:
    spec:
      restartPolicy: Never
      containers:
        - name: ckpt-tools
          image: IMAGE  # with ckpt-tools
          command: [bash, -c]
          args:
            - {command} --part "$((JOB_COMPLETION_INDEX + 1))/{count}"
          resources:
            requests: {{cpu: "{cpus}", memory: {memory_mib}Mi}}
          volumeMounts:
            - {{name: checkpoints, mountPath: /checkpoints}}  # as in the paths above
      volumes:
        - name: checkpoints
          persistentVolumeClaim: {{claimName: CLAIM}}  # ReadWriteMany
"""


def format_job_script(scheduler: str, context: click.Context, part: PartNumber, memory_bytes: int, cpus: int) -> str:
    """The script of a job whose every process runs ``convert`` as the command line of ``context`` says, each with a
    part. ``memory_bytes`` is what a process takes. Raises UsageError for options that a script may not show."""
    command = shlex.join(["ckpt-tools", "convert", *_list_words(context)])
    template = _SLURM if scheduler == "slurm" else _KUBERNETES
    memory_mib = -(-memory_bytes * 3 // 2 >> 20)  # half as much again: what a scheduler counts is not all resident
    return template.format(count=part.count, command=command, cpus=cpus, memory_mib=memory_mib).rstrip("\n")


def _list_words(context: click.Context) -> Iterator[str]:
    """SRC, DST and the options that were given, but for those about the plan itself."""
    yield from (context.params["src"], context.params["dst"])
    for option in context.command.params:
        name = option.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not is_given or not isinstance(option, click.Option) or name in ("part", "script", "as_json", "quiet"):
            continue
        if name == "storage_options":
            raise UsageError(
                f"{format_option('script')} shows no {format_option(name)}, which may be secret; set them where the "
                "job runs, in the environment or in a file of settings"
            )
        value = context.params[name]
        for each in value if option.multiple else [value]:
            yield from [option.opts[-1]] if option.is_flag else (option.opts[-1], str(each))
