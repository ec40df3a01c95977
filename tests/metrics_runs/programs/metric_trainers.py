"""How verl, the Trainers, Megatron, DeepSpeed and vLLM print the numbers of a run.

Sources are given as repository, path and line or function, commit. Names and number
formats are theirs; the lines around them are of the same kind as a job's.
"""

from __future__ import annotations

import json
import math
import pprint
from datetime import timedelta
from typing import Any

from metric_loops import Record
from metric_pages import Page, named

# verl-project/verl verl/utils/logger/aggregate_logger.py concat_dict_to_str,
# verl/trainer/ppo/metric_utils.py, verl/utils/debug/metrics.py,
# verl/workers/engine_workers.py:218, 1dda039b9c6311889a9c9a26040677e1254814f9
VERL = """training/rollout_probs_diff_max=apart/max
training/rollout_probs_diff_mean=apart/mean
training/rollout_probs_diff_std=apart/std
training/rollout_actor_probs_pearson_corr=corr rollout_corr/kl=rollout_kl
rollout_corr/k3_kl=k3 rollout_corr/training_ppl=ppl
rollout_corr/rollout_ppl=rollout_ppl actor/entropy=entropy actor/pg_loss=pg_loss
actor/kl_loss=kl actor/pg_clipfrac=clipfrac actor/ppo_kl=ppo_kl actor/loss=loss
actor/grad_norm=grad_norm perf/max_memory_allocated_gb=mem/allocated
perf/max_memory_reserved_gb=mem/reserved perf/cpu_memory_used_gb=mem/host
actor/lr=lr rollout/moe/max_vio/max=expert/max rollout/moe/min_vio/max=expert/min
rollout/moe/avg_vio/avg=expert/avg critic/score/mean=reward/mean
critic/score/max=reward/max critic/score/min=reward/min
critic/rewards/mean=reward/mean critic/rewards/max=reward/max
critic/rewards/min=reward/min critic/advantages/mean=adv/mean
critic/advantages/max=adv/max critic/advantages/min=adv/min
response_length/mean=length/mean response_length/max=length/max
response_length/min=length/min response_length/clip_ratio=clipped
timing_s/gen=time/gen timing_s/reward=time/reward
timing_s/old_log_prob=time/old_log_prob timing_s/ref=time/ref timing_s/adv=time/adv
timing_s/update_actor=time/update_actor
timing_s/save_checkpoint=time/save_checkpoint
timing_s/update_weights=time/update_weights timing_s/testing=time/testing
timing_s/step=time/step perf/total_num_tokens=tokens perf/time_per_step=time/step
critic/vf_loss=value/loss critic/grad_norm=value/norm critic/lr=value/lr
critic/values/mean=value/mean critic/values/max=value/max critic/values/min=value/min
critic/vf_explained_var=value/explained critic/returns/mean=value/returns
timing_s/update_critic=time/update_critic"""


def _verl(page: Page, record: Record) -> dict[str, float]:
    names = VERL
    if page.plan.task == "distill":
        # verl/trainer/distillation/losses.py:118, :225
        names = names.replace("actor/kl_loss=kl", "distillation/loss=kl")
        names = "\n".join(
            word
            for word in names.split()
            if not word.startswith(("critic/", "actor/pg"))
        )
    made = named(record, names)
    made["training/global_step"] = record["step"]
    made["perf/throughput"] = record["tokens"] / record["time/step"] / 8
    if "val/acc" in record:
        made["val-core/openai/gsm8k/reward/mean@1"] = record["val/acc"]
    for whole in ("perf/total_num_tokens", "training/global_step"):
        made[whole] = int(made[whole])
    return made


def verl(page: Page) -> None:
    """``step:N - name:value - ...`` on the console, with tqdm's bar between."""
    page.say("Using LocalLogger is deprecated. The constructor API will change ")
    page.say("Checkpoint tracker file does not exist: checkpoints/latest_iteration.txt")
    page.say("Training from scratch")
    page.say(f"Total training steps: {page.plan.steps}")
    last = 0.0
    for record in page.steps():
        if record["step"] <= last:
            at = int(record["step"]) - 1
            page.say(f"Found checkpoint: checkpoints/global_step_{at}")
            page.say(f"Load from checkpoint folder: checkpoints/global_step_{at}")
            page.say(f"Setting global step to {at}")
        last = record["step"]
        shown = [f"step:{int(last)}"]
        for name, value in _verl(page, record).items():
            told = pprint.pformat(value)
            if page.style.numpy and name.startswith(
                ("actor/", "perf/max", "training/r")
            ):
                told = f"np.float64({told})"
            shown.append(f"{name}:{told}")
        if page.random.random() < page.style.noise:
            page.say(
                "local_global_step_folder: checkpoints/global_step_" + shown[0][5:]
            )
        page.say(" - ".join(shown))
        page.say(page.bar(int(last), "Training Progress: "))
    if page.style.end == "done":
        page.say(f"Final validation metrics: {{'val-core/openai/gsm8k/reward/mean@1': "
                 f"{page.records[-1].get('val/acc', 0.5)!r}}}")  # fmt: skip


def verl_jsonl(page: Page) -> None:
    """verl/utils/tracking.py FileLogger: a JSON object a step."""
    for record in page.steps():
        data = {
            name: value if math.isfinite(value) else None  # orjson writes null
            for name, value in _verl(page, record).items()
        }
        row = {"step": int(record["step"]), "data": data}
        page.say(json.dumps(row, separators=(",", ":")))


# huggingface/trl trl/trainer/grpo_trainer.py log, trl/experimental/distillation/
# distillation_trainer.py:1115, f2cd57710ae345ea6428ae95363267fcf38a3dc8; transformers
# 4.57 and 5.19 trainer_callback.py ProgressCallback.on_log (the latter prints strings)
TRL = """loss=loss grad_norm=grad_norm learning_rate=lr num_tokens=all_tokens
completions/mean_length=length/mean completions/min_length=length/min
completions/max_length=length/max completions/clipped_ratio=clipped
rewards/accuracy_reward/mean=reward/mean rewards/accuracy_reward/std=reward/std
reward=reward/mean reward_std=reward/std frac_reward_zero_std=zero_std kl=kl
entropy=entropy clip_ratio/region_mean=clipfrac
sampling/sampling_logp_difference/mean=logp_diff step_time=time/step"""
GKD = "loss=loss grad_norm=grad_norm learning_rate=lr"
DISTILLATION = GKD + (
    " completions/mean_length=length/mean completions/max_length=length/max"
    " completions/min_length=length/min completions/truncated_fraction=clipped"
)
SFT = GKD + " entropy=entropy num_tokens=all_tokens aux_loss=aux"
# trl/trainer/dpo_trainer.py
DPO = GKD + (
    " rewards/chosen=pairs/chosen rewards/rejected=pairs/rejected"
    " rewards/accuracies=pairs/accuracy rewards/margins=pairs/margin"
    " logps/chosen=pairs/logps_chosen logps/rejected=pairs/logps_rejected"
    " logits/chosen=pairs/logits_chosen logits/rejected=pairs/logits_rejected"
)
# modelscope/ms-swift swift/trainers/patcher.py add_train_message,
# 3602360a562313afbf2ef6065fdf61f271a2c5b9
SWIFT_GRPO = TRL.replace("num_tokens=all_tokens", "").replace("/region_mean", "")


def _trainer(page: Page, names: str, desc: str = "", swift: bool = False) -> None:
    total, old, last = page.plan.steps, page.style.old, 0.0
    all_tokens = 0.0
    page.parts.append(f"\r{page.bar(0, desc)}")
    for record in page.steps():
        all_tokens += record["tokens"] * page.style.every
        record["all_tokens"] = all_tokens
        at = int(record["step"])
        if at <= last:
            page.parts.append(f"\nResuming training from checkpoint-{at - 1}\n")
        last = at
        if "overflow" in record:
            _overflow(page, record)
        logs: dict[str, Any] = named(record, names)
        if math.isnan(logs["loss"]):
            logs["loss"] = 0.0  # TrainingArguments.logging_nan_inf_filter
        if old:
            logs["loss"] = round(logs["loss"], 4)
        logs["epoch"] = round(at / total * 3, 2)
        if swift:
            speed = page.elapsed / at
            logs = {name: round(value, 8) for name, value in logs.items()}
            logs["global_step/max_steps"] = f"{at}/{total}"
            for name, spent in (("elapsed", at), ("remaining", total - at)):
                seconds = int(speed * spent)
                logs[name + "_time"] = f"{seconds // 60}m {seconds % 60}s"
            logs["memory(GiB)"] = round(record["mem/reserved"], 2)
            logs["train_speed(s/it)"] = round(speed, 6)
        if not old:
            logs = {
                name: f"{value:.4g}" if isinstance(value, float) else value
                for name, value in logs.items()
            }
        bar = page.bar(at, desc)
        page.parts.append(f"\r{' ' * len(bar)}\r{logs}\n\r{bar}")
        if "val/loss" in record:
            found: dict[str, Any] = {
                "eval_loss": record["val/loss"],
                "eval_mean_token_accuracy": record["val/acc"],
                "eval_runtime": record["time/testing"],
                "epoch": logs["epoch"],
            }
            if not old:
                found = {k: f"{v:.4g}" if k != "epoch" else v for k, v in found.items()}
            page.parts.append(f"\n{found}\n\r{bar}")
    if page.style.end == "done":
        losses = [one["loss"] for one in page.records]
        closing: dict[str, Any] = {
            "train_runtime": round(page.elapsed, 4),
            "train_samples_per_second": round(
                page.plan.batch * total / page.elapsed, 3
            ),
            "train_steps_per_second": round(total / page.elapsed, 3),
            "train_loss": sum(losses) / len(losses),
        }
        if not old:
            closing = {name: f"{value:.4g}" for name, value in closing.items()}
        page.parts.append(f"\n{closing}\n\r{page.bar(total, desc)}\n")


def trl(page: Page) -> None:
    """The Trainer's dictionaries between redrawn bars."""
    task = page.plan.task
    names = {"rl": TRL, "distill": DISTILLATION, "sft": SFT, "dpo": DPO}[task]
    _trainer(page, names)


def trl_gkd(page: Page) -> None:
    """trl/experimental/gkd logs only what the Trainer does."""
    _trainer(page, GKD)


def swift(page: Page) -> None:
    """ms-swift's dictionaries, with memory, speed and the time that remains."""
    names = SWIFT_GRPO if page.plan.task == "rl" else SFT.replace("num_tokens=", "_=")
    _trainer(page, names.replace("_=all_tokens", ""), "Train: ", swift=True)


def swift_jsonl(page: Page) -> None:
    """ms-swift's logging.jsonl (swift/trainers/patcher.py append_to_jsonl)."""
    for record in page.steps():
        logs: dict[str, Any] = named(record, SFT.replace("num_tokens=all_tokens", ""))
        if page.plan.task != "sft":
            logs = named(record, SWIFT_GRPO)
        at = int(record["step"])
        logs |= {"epoch": round(at / page.plan.steps * 3, 4)}
        logs["global_step/max_steps"] = f"{at}/{page.plan.steps}"
        logs["memory(GiB)"] = round(record["mem/reserved"], 2)
        logs["train_speed(s/it)"] = round(page.elapsed / at, 6)
        page.say(json.dumps(logs))


# NVIDIA/Megatron-LM megatron/training/training.py training_log,
# 86df799dc4c78e4bd7fbae972b3ee743e8b14f02
def megatron(page: Page) -> None:
    """One line an interval; a loss that is not above 0 or NaN is left out there."""
    skipped = nan = 0
    page.say("training ...")
    page.say(f"[before the start of training step] datetime: {page.time()} ")
    for record in page.steps():
        at, loss = int(record["step"]), record["loss"]
        nan, before = int(math.isnan(loss)), skipped
        skipped = int(record["skipped"])
        text = f" [{page.time()}] iteration {at:8d}/{page.plan.steps:8d} |"
        text += f" consumed samples: {at * 256:12d} |"
        text += f" elapsed time per iteration (ms): {record['time/all'] * 1000:.1f} |"
        tflops = record["tokens"] / record["time/step"] / 9
        text += f" throughput per GPU (TFLOP/s/GPU): {tflops:.1f} |"
        text += f" learning rate: {record['lr']:.6E} | global batch size: {256:5d} |"
        if loss >= 0:
            text += f" lm loss: {loss:.6E} |"
        if "aux" in record:
            text += f" load_balancing_loss: {record['aux']:.6E} |"
        text += f" loss scale: {record.get('scale', 1.0):.1f} |"
        text += f" grad norm: {record['grad_norm']:.3f} |"
        text += f" number of skipped iterations: {skipped - before:3d} |"
        text += f" number of nan iterations: {nan:3d} |"
        page.say(text)
        if "val/loss" in record:
            value = record["val/loss"]
            line = f" validation loss at iteration {at} | lm loss value: {value:.6E} | "
            line += f"lm loss PPL: {math.exp(min(20, value)):.6E} | "
            page.say("-" * len(line))
            page.say(line)
            page.say("-" * len(line))
        if page.plan.save_every and at % page.plan.save_every == 0:
            page.say(
                f"saving checkpoint at iteration {at:7d} to checkpoints"
                " in torch_dist format"
            )
            page.say(
                f"  successfully saved checkpoint from iteration {at:7d} to checkpoints"
            )
    if page.style.end == "done":
        page.say(f"[after training is done] datetime: {page.time()} ")


# deepspeedai/DeepSpeed runtime/engine.py:3656 _report_progress, utils/timer.py
# ThroughputTimer.stop, runtime/fp16/loss_scaler.py:274, utils/logging.py:39,
# edaa7221267243c7be7fb49c5d5f5c4fb97b4641
def _deepspeed(page: Page, where: str, text: str) -> None:
    head = page.time("[%Y-%m-%d %H:%M:%S,%f] [INFO] ")
    page.parts.append(f"{head}[{where}] {text}\n")


def _overflow(page: Page, record: Record) -> None:
    if record["overflow"]:
        now, less = int(record["scale"]), int(max(1, record["scale"] / 2))
        text = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: "
        _deepspeed(
            page, "loss_scaler.py:277:update_scale", f"{text}{now}, reducing to {less}"
        )


def deepspeed(page: Page) -> None:
    """The engine's own reports beside a plain loop's ``step N loss``."""
    all_time = 0.0
    for record in page.steps():
        at, skipped = int(record["step"]), int(record["skipped"])
        if "overflow" in record:
            _overflow(page, record)
        all_time += record["time/all"]
        text = f"[Rank 0] step={at}, skipped={skipped}, lr=[{record['lr']!r}], "
        _deepspeed(page, "logging.py:129:log_dist", text + "mom=[(0.9, 0.95)]")
        text = f"epoch=0/micro_step={at * 4}/global_step={at}, RunningAvgSamplesPerSec="
        batch, memory = page.plan.batch, round(record["mem/allocated"], 2)
        text += f"{batch * at / page.elapsed}, CurrSamplesPerSec="
        text += f"{batch / record['time/step']}, MemAllocated={memory}GB, "
        text += f"MaxMemAllocated={round(record['mem/reserved'], 2)}GB"
        _deepspeed(page, "timer.py:264:stop", text)
        page.say(f"step {at} loss {record['loss']:.4f}")
    if page.style.end == "done":
        page.say("Training complete. Saved model to output/final")


# vllm/v1/spec_decode/metrics.py SpecDecodingLogging.log
def _drafts(record: Record) -> str:
    """Three tokens are proposed at a time; each is taken if those before it are."""
    each = [record["accept"] ** (at + 1) for at in range(3)]
    drafted = record["made"] * 3 / (1 + sum(each))
    accepted = drafted * sum(each) / 3
    positions = ", ".join(f"{one:.3f}" for one in each)
    return (
        f"[metrics.py:120] SpecDecoding metrics: Mean acceptance length: "
        f"{1 + sum(each):.2f}, Accepted throughput: {accepted:.2f} tokens/s, "
        f"Drafted throughput: {drafted:.2f} tokens/s, Accepted: {accepted * 10:.0f} "
        f"tokens, Drafted: {drafted * 10:.0f} tokens, Per-position acceptance rate: "
        f"{positions}, Avg Draft acceptance rate: {sum(each) / 3 * 100:.1f}%"
    )


# vllm 0.32.0 vllm/v1/metrics/loggers.py LoggingStatLogger.log, vllm/logger.py _FORMAT
def vllm(page: Page) -> None:
    """The engine's line every ten seconds; ``engine`` makes its numbers."""
    for record in page.records:
        page.now += timedelta(seconds=10)
        head = f"(APIServer pid={page.pid}) INFO {page.time('%m-%d %H:%M:%S')} "
        text = "[loggers.py:335] Engine 000: "
        text += f"Avg prompt throughput: {record['prompt']:.1f} tokens/s, "
        text += f"Avg generation throughput: {record['made']:.1f} tokens/s, "
        text += f"Running: {int(record['running'])} reqs, "
        text += f"Waiting: {int(record['waiting'])} reqs, "
        text += f"Preemptions: {int(record['preempted'])}, " * (record["preempted"] > 0)
        text += f"GPU KV cache usage: {record['used']:.1f}%, "
        text += f"Prefix cache hit rate: {record['hits']:.1f}%"
        page.parts.append(head + text + "\n")
        if "accept" in record:
            page.parts.append(head + _drafts(record) + "\n")
        if page.random.random() < page.style.noise:
            line = f"127.0.0.1:{page.random.randrange(30000, 60000)}"
            line += ' - "POST /v1/completions HTTP/1.1" 200 OK'
            page.parts.append(f"(APIServer pid={page.pid}) INFO:     {line}\n")
    if page.style.end == "done":
        for line in (
            "Shutting down",
            "Waiting for application shutdown.",
            "Application shutdown complete.",
            "Finished server process [1]",
        ):
            page.parts.append(f"(APIServer pid={page.pid}) INFO:     {line}\n")


FORMATS = (
    verl,
    verl_jsonl,
    trl,
    trl_gkd,
    swift,
    swift_jsonl,
    megatron,
    deepspeed,
    vllm,
)
