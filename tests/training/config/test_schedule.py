from __future__ import annotations

import pytest
import torch

from training.config.schedule import Schedule, schedule_for

pytestmark = pytest.mark.quick


def test_factors_of_a_short_run():
    schedule = Schedule(warmup_steps=2, total_steps=6)
    factors = [schedule.factor(step) for step in range(7)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


def test_other_shapes_come_after_the_same_warm_up():
    line = [Schedule(2, 6, "linear").factor(step) for step in range(7)]
    assert line == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
    assert [Schedule(2, 6, "constant").factor(step) for step in range(7)] == [0.5, *[1.0] * 6]


def test_a_run_of_one_step_has_no_warm_up():
    assert schedule_for(1, 0.5) == Schedule(0, 1)


def test_the_scheduler_saves_numbers_only_and_resumes():
    def attached() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        return optimizer, schedule_for(10, 0.2).attach(optimizer)

    optimizer, scheduler = attached()
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    state = scheduler.state_dict()
    assert state["lr_lambdas"] == [None]
    _, resumed = attached()
    resumed.load_state_dict(state)
    assert resumed.get_last_lr() == scheduler.get_last_lr()
    assert resumed.last_epoch == 4
