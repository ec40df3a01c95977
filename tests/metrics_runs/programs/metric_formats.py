"""How slime, NeMo-RL, OpenRLHF, prime-rl, AReaL and others print a run's numbers.

Sources are given as repository, path and line or function, commit. Names and number
formats are theirs; the lines around them are of the same kind as a job's.
"""

from __future__ import annotations

import json
import pprint
from datetime import timedelta

from metric_pages import OFF, Page, named, submitted

# THUDM/slime slime/backends/megatron_utils/model.py:918, slime/observability/
# train_metric_utils.py:135, :401, rollout_metrics.py:268, logging_utils.py:21,
# 624b824a898ab0ec1fcb4d373004c7f3852bf515; radixark/miles
# miles/backends/training_utils/log_utils.py:123, :542, miles/utils/logging_utils.py:35,
# 31f1ca961a94cb860cec3b2dea34ec332bfa8f76
SLIME = """train/loss=loss train/pg_loss=pg_loss train/entropy_loss=entropy
train/pg_clipfrac=clipfrac train/ppo_kl=ppo_kl
train/train_rollout_logprob_abs_diff=logp_diff train/kl_loss=kl
train/grad_norm=grad_norm train/lr-pg_0=lr"""
SLIME_ROLLOUT = """rollout/response_len/mean=length/mean
rollout/response_len/max=length/max rollout/response_len/min=length/min
rollout/zero_std/count_0=zero_std rollout/truncated_ratio=clipped
rollout/spec_accept_rate=accepted
perf/rollout_time=time/gen"""
SLIME_DATA = """rollout/raw_reward=reward/mean rollout/truncated=clipped
rollout/response_lengths=length/mean rollout/advantages=adv/mean"""
SLIME_PERF = """perf/log_probs_time=time/old_log_prob
perf/ref_log_probs_time=time/ref perf/actor_train_time=time/update_actor
perf/update_weights_time=time/update_weights perf/train_wait_time=time/gen
perf/step_time=time/step"""


def slime(page: Page, milli: bool = False) -> None:
    """``perf N: {...}``, ``rollout N: {...}``, ``step N: {...}`` from their actors."""
    stamp = "[%Y-%m-%d %H:%M:%S.%f rank0]" if milli else "[%Y-%m-%d %H:%M:%S]"
    files = (
        "rollout.py:431",
        "log_utils.py:123",
        "log_utils.py:542",
        "log_utils.py:97",
    )
    if not milli:
        files = ("rollout_metrics.py:268", "train_metric_utils.py:135",
                 "model.py:918", "train_metric_utils.py:401")  # fmt: skip
    for record in page.steps():
        at = int(record["step"]) - 1
        page.actor = "RolloutManager"
        made = named(record, SLIME_ROLLOUT)
        made["perf/tokens_per_gpu_per_sec"] = record["tokens"] / record["time/gen"] / 8
        page.say(f"{page.time(stamp)} {files[0]} - perf {at}: {made}")
        page.actor = "MegatronTrainRayActor"
        page.say(
            f"{page.time(stamp)} {files[1]} - rollout {at}: {named(record, SLIME_DATA)}"
        )
        made = named(record, SLIME) | {"train/step": at}
        page.say(f"{page.time(stamp)} {files[2]} - step {at}: {made}")
        page.say(
            f"{page.time(stamp)} {files[3]} - perf {at}: {named(record, SLIME_PERF)}"
        )
    submitted(page)


def miles(page: Page) -> None:
    """The same of miles, with milliseconds and the rank in front."""
    slime(page, milli=True)


# NVIDIA-NeMo/RL nemo_rl/algorithms/grpo.py:2822, :3703, :3734, :3805 and
# distillation.py:1091, 7ea279abfbeb698b092856d0dab61e7cf39bc909
def nemo(page: Page) -> None:
    """A block a step: results, then times with their shares."""
    rl, total = page.plan.task == "rl", page.plan.steps
    names = """generation=time/gen policy_training=time/update_actor
    prepare_for_generation/total=time/update_weights
    checkpointing=time/save_checkpoint policy_and_reference_logprobs=time/ref
    logprob_inference_prep=time/old_log_prob reward_calculation=time/reward
    total_validation_time=time/testing"""
    for record in page.steps():
        at = int(record["step"])
        page.say(f"\n{'=' * 25} Step {at}/{total} {'=' * 25}")
        work = ("Preparing batch", "Generating responses for batch of size 64")
        for text in (*work, "Computing logprobs", "Training policy"):
            page.say(f"▶ {text}...")
        if "val/acc" in record:
            page.say(f"▶ Starting validation at step {at}...")
            page.say("\n📊 Validation Results:")
            page.say(f"    • Accuracy: {record['val/acc']:.4f}")
            page.say(
                f"    • Average response length: {record['length/mean']:.1f} tokens"
            )
            page.say("    • Samples processed: 64")
        page.say("\n📊 Training Results:")
        page.say(f"  • Loss: {record['loss']:.4f}")
        if rl:
            page.say(f"  • Generation KL Error: {record['k3']:.4f}")
            page.say(f"  • Avg Reward: {record['reward/mean']:.4f}")
        page.say(f"  • Mean Generation Length: {record['length/mean']:.4f}")
        page.say("\n⏱️  Timing:")
        whole = record["time/step"]
        page.say(f"  • Total step time: {whole:.2f}s")
        times = named(record, names)
        for name, value in sorted(times.items(), key=lambda one: -one[1]):
            page.say(f"  • {name}: {value:.2f}s ({value / whole * 100:.1f}%)")
    if page.style.end == "done":
        page.say("Max number of steps has been reached, stopping training early")


# OpenRLHF/OpenRLHF openrlhf/trainer/ppo_trainer.py:547, trainer/ray/ppo_actor.py:230,
# trainer/sft_trainer.py:184, utils/logging_utils.py:10,
# 3c3be6234e0cb353e76bb8019947db9dfe99fca7
def openrlhf(page: Page) -> None:
    """Bars with a postfix, and the whole status of each global step."""
    names = """policy_loss=pg_loss actor_lr=lr actor_grad_norm=grad_norm
    ppo_kl=ppo_kl entropy_loss=entropy reward=reward/mean kl=kl
    response_length=length/mean truncated=clipped vllm_kl=rollout_kl
    timing/make_experience=time/ref timing/ppo_train=time/update_actor
    timing/broadcast=time/update_weights timing/generation=time/gen
    timing/step_total=time/step"""
    short = "act_loss=pg_loss reward=reward/mean gen_len=length/mean kl=kl act_lr=lr"
    total = page.plan.steps
    for record in page.steps():
        at = int(record["step"])
        if page.plan.task == "sft":
            made = named(record, "gpt_loss=loss lr=lr grad_norm=grad_norm aux_loss=aux")
            # tqdm.set_postfix shows three significant digits
            told = ", ".join(f"{name}={value:.3g}" for name, value in made.items())
            page.parts.append(
                "\r" + page.bar(at, "Train step of epoch 0: ", postfix=told)
            )
            continue
        made = named(record, short)
        told = ", ".join(f"{name}={value:.3g}" for name, value in made.items())
        page.actor = "PolicyModelActor"
        page.say(page.bar(4, "Train epoch [1/1]: ", total=4, postfix=told))
        page.actor = "PPOTrainer"
        head = page.time("INFO %m-%d %H:%M:%S ppo_trainer.py:547] ")
        page.say(f"{head}✨ Global step {at}: {named(record, names)}")
        page.say(page.bar(at, "Episode [1/1]: ", total=total))
    submitted(page)


# PrimeIntellect-ai/prime-rl src/prime_rl/trainer/rl/train.py:638, trainer/sft/train.py
# :607, orchestrator/orchestrator.py log_train_batch, utils/logger.py setup_logger,
# 559b44772e471d1538537b8805cc77f3824a5e64
def prime(page: Page) -> None:
    """loguru's lines, one of the trainer and in RL one of the orchestrator."""

    def line(level: str, text: str) -> None:
        on, off = ("\x1b[32m\x1b[1m", OFF) if page.style.colours else ("", "")
        page.parts.append(f"{page.time('%H:%M:%S')} {on}{level:>7}{off} {text}\n")

    kind = "SFT" if page.plan.task == "sft" else "RL"
    line("INFO", f"Starting {kind} trainer in World(world_size=8, rank=0)")
    for record in page.steps():
        at, took = int(record["step"]), _human(record["time/step"])
        text = f"Step {at} | {took:>7} | Loss {record['loss']:.4f}"
        if "entropy" in record:
            text += (
                f" | Entropy {record['entropy']:.4f} | Mismatch KL {record['k3']:.4f}"
            )
        text += f" | Grad. Norm {record['grad_norm']:.4f} | LR {record['lr']:.2e}"
        speed = record["tokens"] / record["time/step"]
        memory = record["mem/reserved"]
        text += f" | Throughput {speed:.0f} tokens/s | MFU {speed / 40:.1f}%"
        text += f" | Peak Mem. {memory:.1f}"
        text += " GiB" if kind == "RL" else f"/139.8 GiB ({memory / 1.398:.1f}%)"
        if "expert/max" in record:
            text += f" | Max Vio {record['expert/max']:.4f}"
        if kind == "RL":
            head = f"Step {at} | {took:>7} | Reward {record['reward/mean']:.4f} | "
            head += (
                "Trainable 64/64 (100.0%) | Turns 1.0 | Branches 1.0 | Max Off-Policy 1"
            )
            head += (
                f" | Error 0.0% | Cancelled 0.0% | Truncation {record['clipped']:.1%}"
            )
            line("SUCCESS", head)
        line("SUCCESS", text)
        if "val/loss" in record:
            line("SUCCESS", f"Validation | Step {at} | Loss {record['val/loss']:.4f}")
        if page.plan.save_every and at % page.plan.save_every == 0:
            line("INFO", f"Saving checkpoint at step {at}")
    if page.style.end == "done":
        line("SUCCESS", f"{kind} trainer finished!")


def _human(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds * 1000:.0f}ms" if seconds < 1 else f"{seconds:.1f}s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 60:
        return f"{int(minutes)}m {int(rest)}s"
    return f"{int(minutes // 60)}h {int(minutes % 60)}m"


# inclusionAI/AReaL areal/utils/stats_logger.py commit, areal/utils/printing.py
# tabulate_stats, areal/utils/logging.py:19, 4aef98d8d818af55b43621aaadba047ae10f4e77
def areal(page: Page) -> None:
    """A table of four columns of names and values a step."""
    names = """ppo_actor/update/actor_loss/avg=pg_loss
    ppo_actor/update/entropy/avg=entropy ppo_actor/update/grad_norm=grad_norm
    ppo_actor/update/lr=lr ppo_actor/kl_rewards/avg=kl
    ppo_actor/task_reward/avg=reward/mean ppo_actor/task_reward/max=reward/max
    ppo_actor/task_reward/min=reward/min ppo_actor/seq_len/avg=length/mean
    ppo_actor/seq_len/max=length/max ppo_actor/no_eos_ratios/avg=clipped
    ppo_actor/update/importance_weight/avg=is timeperf/rollout=time/gen
    timeperf/recompute_logp=time/old_log_prob timeperf/ref_logp=time/ref
    timeperf/train_step=time/update_actor
    timeperf/update_weights=time/update_weights"""
    total = page.plan.steps

    def line(text: str) -> None:
        page.parts.append(
            f"(AReaL) {page.time('%Y%m%d-%H:%M:%S.%f')} StatsLogger INFO: {text}\n"
        )

    for record in page.steps():
        at = int(record["step"])
        line(f"Epoch 1/1 Step {at}/{total} Train step {at}/{total} done.")
        line("Stats (1/1):")
        items = [(k, f"{v:.4e}") for k, v in named(record, names).items()]
        rows = -(-len(items) // 4)
        table = [[cell for j in range(4) if i + j * rows < len(items)
                  for cell in items[i + j * rows]] for i in range(rows)]  # fmt: skip
        table = [row + [""] * (8 - len(row)) for row in table]
        wide = [max(len(row[i]) for row in table) for i in range(8)]
        rule = ["═" * (width + 2) for width in wide]
        inner = "\n├" + "┼".join("─" * (width + 2) for width in wide) + "┤\n"
        body = inner.join(
            "".join(
                f"│ {cell:{'>' if at % 2 else '<'}{wide[at]}} "
                for at, cell in enumerate(row)
            )
            + "│"
            for row in table
        )
        line(f"\n╒{'╤'.join(rule)}╕\n{body}\n╘{'╧'.join(rule)}╛")
    if page.style.end == "done":
        line(f"Training completes! Total time elapsed {page.elapsed:.2f}.")


# NovaSky-AI/SkyRL skyrl/train/utils/tracking.py:189 ConsoleLogger, trainer.py:601,
# a9564572eb8e91076be43c1bd5e4615e3de17265
def skyrl(page: Page) -> None:
    """loguru, with a pretty-printed dictionary over several lines."""
    names = """policy/final_loss=loss policy/policy_loss=pg_loss
    policy/policy_entropy=entropy policy/raw_grad_norm=grad_norm
    policy/policy_lr=lr policy/policy_kl=kl
    policy/rollout_train_logprobs_abs_diff_mean=logp_diff
    generate/avg_num_tokens=length/mean generate/max_num_tokens=length/max
    generate/min_num_tokens=length/min reward/avg_raw_reward=reward/mean
    loss/avg_final_rewards=reward/mean timing/generate=time/gen
    timing/fwd_logprobs_values_reward=time/old_log_prob
    timing/train_critic_and_policy=time/update_actor
    timing/sync_weights=time/update_weights timing/step=time/step
    timing/eval=time/testing eval/all/avg_score=val/acc"""

    def line(where: str, text: str) -> None:
        head = page.time("%Y-%m-%d %H:%M:%S.%f | INFO     | ")
        page.say(f"{head}skyrl.train.{where} - {text}")

    for record in page.steps():
        at = int(record["step"])
        if page.random.random() < page.style.noise:
            line("trainer:forward:963", "batch_num_seq: 64, batch_padded_seq_len: 1104")
        made = {name: f"{value:.4f}" for name, value in named(record, names).items()}
        line("utils.tracking:log:189", f"Step {at}: \n{pprint.pformat(made)}")
        page.say(page.bar(at, "Training Batches Processed: "))
    if page.style.end == "done":
        line("trainer:train:601", "Training done!")


# alibaba/ROLL roll/pipeline/distill/distill_pipeline.py:277, :331, utils/logging.py:59,
# 8eb27cc2dc34c4d1310b169d9b86d339004d811a
def roll(page: Page) -> None:
    """JSON within a line of the pipeline's logger."""
    names = """student/loss=loss student/lr=lr student/grad_norm=grad_norm
    student/distill_loss=kl time/student_train=time/update_actor
    time/teacher_forward=time/ref time/step=time/step
    memory/student_train/max_allocated=mem/allocated"""

    def line(text: str) -> None:
        head = page.time("[%Y-%m-%d %H:%M:%S] [distill_pipeline.py (331)] [INFO] ")
        page.say(f"{head}[DRIVER 0 / 1][PID {page.pid}] {text}")

    for record in page.steps():
        at = int(record["step"])
        line(f"pipeline step {at - 1} start...")
        made = named(record, names)
        line(json.dumps(made, ensure_ascii=False))
        line(f"pipeline step {at - 1} finished")
    if page.style.end == "done":
        line("pipeline complete!")


# Lightning-AI/pytorch-lightning src/lightning/pytorch/callbacks/progress/
# tqdm_progress.py, src/lightning/pytorch/loops/evaluation_loop.py _print_results,
# d4a30c984cdbbffb81a77cdd526ed3402abef7d6
def lightning(page: Page) -> None:
    """A bar an epoch of twenty steps with metrics behind it, a table a validation."""
    long, total, first = 20, page.plan.steps, page.now
    for record in page.steps():
        at = int(record["step"])
        epoch, within = divmod(at - 1, long)
        if within == 0:
            first = page.now - timedelta(seconds=record["time/step"])
        page.began = first
        told = f"v_num=0, train_loss={record['loss']:#.3g}, lr={record['lr']:.3g}"
        told += f", grad_norm={record['grad_norm']:#.3g}"
        page.parts.append(
            "\r" + page.bar(within + 1, f"Epoch {epoch}: ", total=long, postfix=told)
        )
        if within + 1 == long:
            page.parts.append("\n")
        if "val/loss" in record:
            wide = "─" * 60
            page.parts.append(
                f"\n{wide}\n     Validate metric           DataLoader 0\n{wide}\n"
            )
            for name in ("val/acc", "val/loss"):
                page.parts.append(
                    f"        {name.replace('/', '_'):<18}{record[name]!s:^30}\n"
                )
            page.parts.append(wide + "\n")
    if page.style.end == "done":
        page.parts.append(f"`Trainer.fit` stopped: `max_steps={total}` reached.\n")


FORMATS = (slime, miles, nemo, openrlhf, prime, areal, skyrl, roll, lightning)
