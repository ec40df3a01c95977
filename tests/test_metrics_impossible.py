"""What no sound run prints fails it; what merely resembles it does not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from test_metrics_notes import Values, noise, run, seen

Metrics = dict[str, Values]
RATE: Metrics = {"lr": lambda n: 2e-3, "grad_norm": lambda n: 0.6 + noise(0.03)}
REWARDED: Metrics = {"critic__rewards__mean": lambda n: 0.2 + 0.005 * n + noise(0.02)}


@pytest.fixture(autouse=True)
def _same_noise() -> None:
    random.seed(5)


def learned(n: int) -> float:
    return 0.5 + 2 * 0.97**n + noise(0.05)


def flat(n: int) -> float:
    return 2.6 + noise(0.1)


def refreshed(n: int, every: int) -> float:
    """A loss that falls, printed in each step but measured now and then."""
    return 2.0123 - n // every * every / 100


def preferences(chosen: Values) -> Metrics:
    return {
        "logps__chosen": chosen,
        "rewards__chosen": lambda n: 0.1 * min(chosen(n) + 20, 0),
        "logps__rejected": lambda n: -50 - n + noise(1),
        "rewards__margins": lambda n: 0.05 * n,
    }


def critic(value_loss: Values, returns: float = 1.0) -> Metrics:
    return {
        "critic__vf_loss": value_loss,
        "critic__rewards__mean": lambda n: returns * min(1, n / 60) + noise(0.01),
    }


BROKEN: dict[str, tuple[str, Metrics]] = {
    "a divergence goes below what any may be": (
        "train.diverged",
        {"distillation__loss": lambda n: 2.0 - n / 30 + noise(0.02)},
    ),
    "one loss for ever": (
        "train.no-grad",
        {"loss": lambda n: learned(n) if n < 60 else 0.6931, **RATE},
    ),
    "the same seven losses": (
        "train.no-grad",
        {"loss": lambda n: learned(n) if n < 60 else 2.5 + math.sin(n % 7), **RATE},
    ),
    "memory climbs in five jumps": (
        "train.memory-leak",
        {
            "perf__max_memory_reserved_gb": lambda n: (
                12 + 4 * min(n, 2) + 8.8 * ((n + 10) // 24)
            )
        },
    ),
    "memory climbs in ten jumps": (
        "train.memory-leak",
        {"perf__max_memory_reserved_gb": lambda n: 20 + 4.4 * ((n + 5) // 12)},
    ),
    "a part grows, and the first steps were slow, too": (
        "train.slow",
        {
            "timing_s__gen": lambda n: 4 + n / 10 + noise(0.1),
            "timing_s__step": lambda n: (18 if n < 16 else 13) + 4 + n / 10,
        },
    ),
    "a critic farther off than any return": (
        "train.diverged",
        critic(lambda n: 0.02 + abs(noise(0.01)) + 200 * (n > 60)),
    ),
    "a critic worse than a constant": (
        "train.diverged",
        {
            "critic__vf_loss": lambda n: 0.02 + abs(noise(0.01)) + 3 * (n > 60),
            "critic__vf_explained_var": lambda n: 0.5 if n < 60 else -9.0,
        },
    ),
    "a limit that cuts all answers short": (
        "train.diverged",
        {
            "response_length__mean": lambda n: (
                440 + noise(30) if n < 50 else 192 - 0.4 * max(0, n - 80)
            ),
            "response_length__clip_ratio": lambda n: float(50 <= n < 80),
        },
    ),
    "the chosen answers become impossible": (
        "train.diverged",
        preferences(lambda n: max(-240.0, -16.0 - 4 * n) + noise(2)),
    ),
    "pairs are guessed and the loss explodes": (
        "train.diverged",
        {
            "rewards__accuracies": lambda n: 0.5 + noise(0.05),
            "loss": lambda n: min(4.0, 0.69 + 0.1 * n) + noise(0.05),
        },
    ),
    "the rollout leaps away": (
        "vllm.wrong-output",
        {"rollout_corr__k3_kl": lambda n: 1e-4 if n < 40 else 0.4 + noise(0.01)},
    ),
    "the rollout is far off from the first step on": (
        "vllm.wrong-output",
        {"training__rollout_probs_diff_mean": lambda n: 0.2 + noise(0.01)},
    ),
    "the rollout is far off and ever more": (
        "sync.not-applied",
        {"training__rollout_probs_diff_mean": lambda n: 0.2 + 0.001 * n},
    ),
    "fewer and fewer tokens": (
        "train.slow",
        {"Throughput": lambda n: 2600 * 0.97 ** max(0, n - 30) + noise(20)},
    ),
    "every third step is slow, by chance": (
        "train.slow",
        {"step_time": lambda n: random.choice((12, 12, 60)) if n > 20 else 12.0},
    ),
    "the rollout leaps away and comes nearer again": (
        "vllm.wrong-output",
        {
            "train_rollout_logprob_abs_diff": lambda n: (
                0.01 if n < 40 else 1.0 + 2 * 0.98 ** (n - 40)
            )
        },
    ),
    "tokens fall and the time of a step does not rise": (
        "train.slow",
        {
            "Throughput": lambda n: 2600 * 0.97 ** max(0, n - 30) + noise(20),
            "step_time": lambda n: 3 + noise(0.1),
        },
    ),
    "a limit that cuts all answers short, of which only the length tells": (
        "train.diverged",
        {"generate__avg_num_tokens": lambda n: 440 + noise(30) if n < 50 else 192.0},
    ),
    "no answer ends any more, from one step to the next": (
        "tokenizer.eos-token",
        {"seq_len__avg": lambda n: 440 + noise(30) if n < 50 else 1024.0},
    ),
    "the largest part of a step takes longer, and no time of the step is printed": (
        "train.slow",
        {
            "timeperf__train_step": lambda n: (12 if n < 60 else 40) + noise(0.3),
            "timeperf__ref_logp": lambda n: (1 if n < 60 else 1.1) + noise(0.03),
        },
    ),
}
SOUND: dict[str, Metrics] = {
    "verl prints a KL loss of 0 if it has none": {
        "actor__kl_loss": lambda n: 0.0,
        **REWARDED,
    },
    "a loss is measured every 70 steps": {"loss": lambda n: refreshed(n, 70)},
    "a loss is measured every ten steps, and then no more": {
        "loss": lambda n: refreshed(min(n, 80), 10)
    },
    "the lowest loss so far": {
        "min_loss": lambda n: learned(n) if n < 60 else 0.51234,
        "last__loss": lambda n: learned(n) if n < 60 else 0.51234,
    },
    "a loss as low as its numbers go": {
        "loss": lambda n: 2 * 0.8**n if n < 60 else 3.142e-6
    },
    "a loss too noisy to tell": {"loss": lambda n: 2.5 + noise(0.6), **RATE},
    "a validation that each line repeats": {
        "loss": learned,
        "eval_loss": lambda n: 2.59612,
    },
    "batches of answers differ in length": {
        "logps__chosen": lambda n: (-20 if n == 1 else -60) + noise(1),
        "logps__rejected": lambda n: (-30 if n == 1 else -70) + noise(1),
    },
    "the chosen answers are always likelier than the rejected ones": {
        **preferences(lambda n: -20 - n / 3 + noise(1)),
        "logps__rejected": lambda n: -80 - n + noise(1),
    },
    "a loss that loses some of its noise": {
        "loss": lambda n: (0.5 + 2 * 0.98**n) * (1 + noise(0.08 * 0.985**n))
    },
    "REINFORCE": {
        "loss": lambda n: 0.5 - n / 100 + noise(0.02),
        "return": lambda n: 20 + n + noise(2),
    },
    "REINFORCE by episodes": {
        "loss": lambda n: (0.5 if n < 60 else -0.6) + noise(0.02),
        "episode_return_mean": lambda n: 20 + n + noise(2),
    },
    "a simple GRPO": {
        "loss": lambda n: (0.5 if n < 60 else -0.6) + noise(0.02),
        "acc": lambda n: 0.2 + n / 200 + noise(0.02),
        "kl": lambda n: n / 1e4,
    },
    "a peak of memory is exceeded three times": {
        "perf__max_memory_reserved_gb": lambda n: 20 + 4.0 * (n // 32)
    },
    "a peak of memory is exceeded six times, and then no more": {
        "perf__max_memory_reserved_gb": lambda n: 20 + 2.0 * min(6, n // 15)
    },
    "a peak of memory is exceeded by less and less": {
        "perf__max_memory_reserved_gb": lambda n: (
            20 + 4 * (n > 25) + 2 * (n > 50) + 1.9 * (n > 75) + 1.5 * (n > 100)
        )
    },
    "a limit somewhat below the usual length": {
        "response_length__mean": lambda n: 440 + noise(30) if n < 50 else 300.0
    },
    "every third step takes twice as long": {
        "step_time": lambda n: random.choice((12, 12, 24)) if n > 20 else 12.0
    },
    "three steps are slow": {
        "step_time": lambda n: 600.0 if n in {41, 66, 113} else 12 + noise(0.5)
    },
    "a KL is rounded to four decimals, unlike the rate": {
        "actor__kl_loss": lambda n: 0.0,
        "actor__kl_coef": lambda n: 0.001,
        "critic__rewards__mean": lambda n: round(0.2 + n / 200 + noise(0.01), 4),
        "lr": lambda n: 1.234e-5,
    },
    "a policy's loss is below 0": {"loss": lambda n: 0.5 - n / 60, **REWARDED},
    "preferences have a loss below 0": {
        "loss": lambda n: 0.7 - n / 60,
        "rewards__margins": lambda n: 0.02 * n,
    },
    "a divergence swings about 0": {"distill_loss": lambda n: noise(0.01)},
    "a new batch has been sampled from the policy itself": {
        "actor__ppo_kl": lambda n: 0.0,
        **REWARDED,
    },
    "a policy that does not move": {
        "actor__kl_loss": lambda n: 0.0,
        "actor__kl_coef": lambda n: 0.001,
        "actor__entropy": lambda n: 0.5 + noise(0.01),
    },
    "no loss of a policy in its first update": {"loss": lambda n: 0.0, **REWARDED},
    "a low rate": {
        "loss": flat,
        "lr": lambda n: 1e-5,
        "grad_norm": lambda n: 0.6 + noise(0.03),
    },
    "harder texts and then learned again": {
        "loss": lambda n: 2.6 + 0.4 * (40 < n < 80) + noise(0.1),
        **RATE,
    },
    "full batches are smooth": {"loss": lambda n: 2 * 0.98**n + 0.1},
    "a loss that is learned by heart keeps its noise": {
        "loss": lambda n: 2 * 0.96**n * (1 + noise(0.05))
    },
    "the critic's error grows with the rewards": critic(
        lambda n: 0.001 + (0.2 * min(1, n / 60)) ** 2 + abs(noise(0.001))
    ),
    "answers shrink by themselves": {
        "response_length__mean": lambda n: 440 - 2 * n + noise(10),
        "response_length__clip_ratio": lambda n: 0.05,
    },
    "the chosen answers become somewhat less likely": preferences(
        lambda n: -20 - 0.1 * n + noise(1)
    ),
    "a checkpoint every fifteen steps": {
        "step_time": lambda n: 60.0 if n % 15 == 0 else 12 + noise(0.5)
    },
    "checkpoints and validations": {
        "step_time": lambda n: 60.0 if not n % 15 or not n % 10 else 12 + noise(0.5)
    },
    "slow steps have long answers": {
        "step_time": lambda n: 60.0 if n * n % 7 == 2 else 12 + noise(0.5),
        "response_length__mean": lambda n: 900.0 if n * n % 7 == 2 else 300 + noise(9),
    },
    "groups are drawn again": {
        "step_time": lambda n: random.choice((12, 12, 60)),
        "train__num_gen_batches": lambda n: 1.0,
    },
    "fewer tokens because answers are shorter": {
        "Throughput": lambda n: 2600 * 0.99**n + noise(20),
        "Mean_Generation_Length": lambda n: 300 * 0.99**n,
    },
    "all is solved, and no gradient is left": {
        "critic__rewards__mean": lambda n: min(1.0, 0.2 + n / 100),
        "actor__grad_norm": lambda n: 0.5 if n < 85 else 0.0,
    },
    "a policy learns to answer in seven tokens": {
        "response_length__mean": lambda n: 20 + noise(2) if n < 50 else 7.0,
        "response_length__clip_ratio": lambda n: 0.0,
    },
    "a loss that is a sum falls": {"loss": lambda n: 3000 * 0.99**n + noise(20)},
    "a random model's loss is high": {"loss": lambda n: 18 - n / 50 + noise(0.5)},
    "a small part of a step takes longer": {
        "timeperf__train_step": lambda n: 12 + noise(0.3),
        "timeperf__ref_logp": lambda n: (1 if n < 60 else 3) + noise(0.03),
    },
    "answers always have one length": {"response_length": lambda n: 8.0},
    "answers grow to the limit step by step": {
        "response_length": lambda n: min(1024.0, 300 + 8 * n + noise(20)),
    },
    "the KL's part of the reward is off": {
        "ppo_actor__kl_rewards__avg": lambda n: 0.0,
        **REWARDED,
    },
    "a peak of memory that is never reset has records": {
        "perf__max_memory_reserved_gb": lambda n: (
            16.0 + sum(n > at for at in (2, 3, 5, 9, 14, 24, 45, 68, 85, 103))
        )
    },
    "generation grows with the square of the answers": {
        "timing_s__gen": lambda n: 4 * (1 + n / 120) ** 1.6 + noise(0.1),
        "timing_s__step": lambda n: 9 + 4 * (1 + n / 120) ** 1.6 + noise(0.2),
        "response_length__mean": lambda n: 300 * (1 + n / 120) + noise(9),
    },
}
NOTED: dict[str, tuple[str, Metrics]] = {
    "steps take ever longer, and nothing tells how long the answers are": (
        "train.slow",
        {"time__step": lambda n: 10 + n / 8 + noise(0.3)},
    ),
    "a policy learns to answer with as many tokens each time": (
        "train.diverged",
        {"response_length": lambda n: 40 + noise(2) if n < 50 else 14.0, **REWARDED},
    ),
    "a loss of thousands, and nothing of its gradients": (
        "train.diverged",
        {"loss": lambda n: 3000 + noise(200)},
    ),
    "a loss of texts changes sign": (
        "train.diverged",
        {"loss": lambda n: learned(n) * (-1 if n > 60 else 1)},
    ),
    "a divergence is somewhat below 0, as one of few tokens may be": (
        "train.diverged",
        {"distill_loss": lambda n: (1.0 if n < 60 else -0.3) + noise(0.01)},
    ),
    "a divergence goes below what any may be, beside a policy's loss": (
        "train.diverged",
        {
            "distillation__loss": lambda n: 2.0 - n / 30 + noise(0.02),
            "actor__pg_loss": lambda n: noise(0.1),
        },
    ),
    "a divergence is the reward of its own policy gradient": (
        "train.diverged",
        {
            "distillation__loss": lambda n: 2.0 - n / 30 + noise(0.02),
            "distillation__ppo_kl": lambda n: noise(1e-4),
        },
    ),
    "the reference is the policy itself": (
        "train.diverged",
        {
            "actor__kl_loss": lambda n: 0.0,
            "actor__kl_coef": lambda n: 0.001,
            **REWARDED,
        },
    ),
    "one loss from the first step on": (
        "train.no-grad",
        {"loss": lambda n: 0.6931, **RATE},
    ),
    "seven losses again and again from the first step on": (
        "train.no-grad",
        {"loss": lambda n: 2.5 + math.sin(n % 7), **RATE},
    ),
    "a student that is trained already": (
        "train.no-grad",
        {**RATE, "loss": lambda n: 0.82 - n / 6000 + noise(0.05)},
    ),
    "one loss soon after the start": (
        "train.no-grad",
        {"loss": lambda n: learned(n) if n < 5 else 0.6931},
    ),
    "a full batch is learned to its floor": (
        "train.no-grad",
        {"loss": lambda n: 0.51234 + 2 * 0.7**n},
    ),
    "a distillation of directions": (
        "train.diverged",
        {"distill_loss": lambda n: (0.02 if n < 30 else -0.9) + noise(0.005)},
    ),
    "the same batch again": (
        "train.diverged",
        {
            "loss": lambda n: (
                2 * 0.995**n + noise(0.1) if n < 50 else 1.5 * 0.93 ** (n - 50)
            )
        },
    ),
    "a task is learned to its floor": (
        "train.diverged",
        {"loss": lambda n: (0.05 + 0.93**n) * (1 + noise(0.1 if n < 50 else 0.005))},
    ),
    "longer answers are less likely": (
        "train.diverged",
        {
            **preferences(lambda n: -20 - 2 * n + noise(1)),
            "rewards__chosen": lambda n: noise(0.1),
        },
    ),
    "the chosen answers become less likely than any were": (
        "train.diverged",
        preferences(lambda n: -20 - n / 2 + noise(1)),
    ),
    "IPO's loss is 25 at first": (
        "train.diverged",
        {
            "rewards__accuracies": lambda n: 0.55 + noise(0.03),
            "loss": lambda n: 25 - n / 20 + noise(0.5),
        },
    ),
    "IPO's loss rises by some": (
        "train.diverged",
        {
            "rewards__accuracies": lambda n: 0.55 + noise(0.03),
            "loss": lambda n: 25 + n / 30 + noise(0.5),
        },
    ),
    "ORPO's loss is 1.8 at first": (
        "train.diverged",
        {
            "rewards__accuracies": lambda n: 0.55 + noise(0.03),
            "loss": lambda n: 1.8 - n / 600 + noise(0.02),
        },
    ),
    "a part grows, and the step by some": (
        "train.slow",
        {
            "timing_s__gen": lambda n: 4 + n / 24 + noise(0.1),
            "timing_s__step": lambda n: 20 + n / 24 + noise(0.1),
        },
    ),
    "the policy changes and the reward does not": (
        "train.diverged",
        {
            "critic__rewards__mean": lambda n: 0.4 + noise(0.03),
            "actor__entropy": lambda n: 1.5 - n / 200 + noise(0.02),
        },
    ),
    "a loss that ends somewhat above its start": (
        "train.diverged",
        {"loss": lambda n: 2.4 + 0.8 * (n > 60) + noise(0.05)},
    ),
    "a loss of unknown kind falls through 0": (
        "train.diverged",
        {"loss": lambda n: 1 - n / 50 + noise(0.01)},
    ),
    "an optimizer without the parameters": ("train.no-grad", {"loss": flat, **RATE}),
    "the teacher contradicts the student now and then": (
        "teacher.wrong-output",
        {
            "distillation__loss": lambda n: 4.3 if n in {60, 85, 110} else learned(n),
            "response_length__mean": lambda n: 300 + noise(20),
        },
    ),
    "pairs are guessed": (
        "train.diverged",
        {
            "rewards__accuracies": lambda n: 0.5 + noise(0.05),
            "loss": lambda n: 0.69 + noise(0.01),
        },
    ),
    "every sixth step is slow, by chance": (
        "train.slow",
        {
            "step_time": lambda n: 60.0 if random.random() < 0.16 else 12 + noise(0.5),
        },
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_fails_the_run(name: str) -> None:
    cause, metrics = BROKEN[name]
    told = [one for one in seen(run(**metrics)) if one.certain]
    assert [one.cause for one in told] == [cause], told


@pytest.mark.parametrize("name", SOUND)
def test_what_can_be_is_no_finding(name: str) -> None:
    assert seen(run(**SOUND[name])) == []


@pytest.mark.parametrize("name", NOTED)
def test_what_proves_nothing_is_noted(name: str) -> None:
    cause, metrics = NOTED[name]
    told = seen(run(**metrics))
    assert [(one.cause, one.certain) for one in told] == [(cause, False)], told


@pytest.mark.parametrize(("falls", "leaps"), [(40, 40), (30, 100)])
def test_a_reward_that_falls_with_the_engine_follows_from_it(
    falls: int, leaps: int
) -> None:
    """One that falls long before it is a cause of its own."""
    told = seen(
        run(
            critic__rewards__mean=lambda n: 0.7 - 0.5 * (n >= falls) - n / 1e3,
            rollout_corr__k3_kl=lambda n: 1e-4 if n < leaps else 0.4 + noise(0.01),
        )
    )
    assert [(one.cause, one.certain) for one in told] == [
        ("train.diverged", falls < leaps),
        ("vllm.wrong-output", True),
    ]


def test_a_run_that_goes_on_from_a_plateau_may_stay_there() -> None:
    lines = run(loss=flat, **RATE)
    resumed = [line.replace("step:", "step:5", 1) for line in lines[10:99]]
    assert seen(resumed) == []


def bar(n: int, pace: float) -> str:
    return f" 10%|# | {n}/400 [01:00<09:00, {pace:.2f}s/it, loss={2 + noise(0.2):.3f}]"


def averages(seconds: Values) -> list[float]:
    """The pace that a bar shows after each step: the mean of all so far."""
    total, found = 0.0, []
    for n in range(1, 121):
        total += seconds(n)
        found.append(total / n)
    return found


def test_pauses_between_fast_steps_do_not_slow_them_down() -> None:
    paces = averages(lambda n: 12 + 400 * (n > 20 and n % 20 == 0))
    assert paces[-1] > 2 * paces[18]
    assert seen([bar(n, pace) for n, pace in enumerate(paces, 1)]) == []


def test_steps_that_take_longer_show_in_the_pace() -> None:
    paces = averages(lambda n: 12 + 40 * (n > 40))
    (one,) = seen([bar(n, pace) for n, pace in enumerate(paces, 1)])
    assert (one.cause, one.certain) == ("train.slow", True)


def test_where_a_time_of_the_step_is_printed_the_pace_is_not_judged() -> None:
    paces = averages(lambda n: 12 + 40 * (n > 40))
    lines = [bar(n, pace) for n, pace in enumerate(paces, 1)]
    assert seen([*lines, *run(step_time=lambda n: 12 + noise(0.1))]) == []


def test_memory_grows_from_its_level_not_from_the_peak_of_the_start() -> None:
    (one,) = seen(run(mem_allocated_gb=lambda n: 20 if n < 3 else 12 + n / 20))
    assert "from 12.3 GiB to 18 GiB" in one.text


def test_a_loss_that_is_no_number_explains_gradients_of_0() -> None:
    lines = [
        f"step:{n} - loss:{2 if n < 40 else math.nan} - grad_norm:{float(n < 40)}"
        for n in range(1, 80)
    ]
    told = {one.cause: one.certain for one in seen(lines)}
    assert told == {"train.nan": True, "train.no-grad": False}


def test_weights_that_grow_apart_in_ever_larger_steps_are_old() -> None:
    told = seen(
        run(rollout_corr__k3_kl=lambda n: min(0.0215, 1e-4 * 1.4 ** max(0, n - 40)))
    )
    assert [(one.cause, one.certain) for one in told] == [("sync.not-applied", True)]


def test_an_engine_may_serve_fewer_requests_than_before() -> None:
    engine = "Avg prompt throughput: 9.0 tokens/s, Avg generation throughput: "
    lines = [f"{engine}{2600 * 0.97**n:.1f} tokens/s" for n in range(120)]
    assert seen(lines) == []


def validated(loss: Values, validation: Values, every: int = 10) -> list[str]:
    """The lines of a run that is validated every so many steps."""
    lines = []
    for n in range(1, 121):
        lines.append(f"step:{n} - loss:{loss(n):.9f}")
        if n % every == 0:
            lines.append(f"step:{n} - eval_loss:{validation(n):.9f}")
    return lines


@pytest.mark.parametrize(("value", "certain"), [(2.5961, True), (2.596, False)])
def test_validations_that_never_change(value: float, certain: bool) -> None:
    told = seen(validated(learned, lambda n: value))
    assert [(one.cause, one.certain) for one in told] == [("sync.not-applied", certain)]


@pytest.mark.parametrize(
    "lines",
    [
        lambda: validated(learned, lambda n: 2.5961, every=30),
        lambda: validated(learned, lambda n: 2.6),
        lambda: validated(flat, lambda n: 2.5961),
        lambda: validated(lambda n: 3 - n / 60, lambda n: refreshed(n, 50), every=5),
    ],
    ids=["four", "few digits", "not trained", "repeated"],
)
def test_validations_that_may_be_the_same(lines: Callable[[], list[str]]) -> None:
    assert seen(lines()) == []


def test_a_loss_of_three_digits_may_be_the_same_for_some_steps() -> None:
    """A bfloat16 near 2.8 is a multiple of 1/64."""
    lines = run(loss=lambda n: round(64 * (2.765 + 0.7**n)) / 64)
    (one,) = seen(lines[:30])
    assert (one.cause, one.certain) == ("train.no-grad", False)
