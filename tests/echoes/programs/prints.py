"""Prints what trainers print of their options and samples, for the logs in tests/echoes.

python prints.py WAY > WAY.log 2>&1          bash prints.sh > commands.log 2>&1

The texts are those of failures, so that whoever takes an echo for evidence finds one.
"""

import argparse
import json
import pprint
import subprocess
import sys

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
    " a total capacity of 79.11 GiB of which 1.00 GiB is free."
)
DISK = "OSError: [Errno 28] No space left on device"
DIED = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
OPTIONS = {
    "trainer": {
        "project_name": "distil",
        "experiment_name": "retry after " + OOM,
        "notes": DISK,
        "default_local_dir": "/data/out",
    },
    "data": {"filter": DIED, "train_files": ["/data/train.parquet"], "max_prompt_length": 512},
    "actor": {"strategy": "fsdp2", "fsdp_config": {"offload_policy": False}, "remark": OOM},
}


def omegaconf_yaml():
    from omegaconf import OmegaConf

    print(OmegaConf.to_yaml(OmegaConf.create(OPTIONS)))


def omegaconf_dict():
    from omegaconf import OmegaConf

    pprint.pprint(OmegaConf.to_container(OmegaConf.create(OPTIONS)))


def omegaconf_line():
    from omegaconf import OmegaConf

    print("config:", OmegaConf.create(OPTIONS))


def json_dump():
    print(json.dumps(OPTIONS, indent=2))


def parser():
    made = argparse.ArgumentParser("train.py")
    made.add_argument("--model", default="Qwen/Qwen3-8B")
    made.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    made.add_argument("--retries", type=int, default=3, help=f"how often after {DISK!r} and the like")
    made.add_argument("--on-oom", default="stop", metavar="WHAT", help=f"what to do after: {OOM}")
    made.add_argument("--note", default="")
    return made


def namespace():
    print(parser().parse_args(["--note", OOM]))


def help_text():
    parser().parse_args(["--help"])


def usage_error():
    parser().parse_args(["--moddel", "x"])


def training_arguments():
    from transformers import TrainingArguments

    print(TrainingArguments(output_dir="out", run_name="again: " + DISK, use_cpu=True))


def model_config():
    from transformers import LlamaConfig

    print("Model config", LlamaConfig(note=OOM, other=DIED))


def megatron_arguments():
    # As megatron/training/arguments.py prints them.
    print("------------------------ arguments ------------------------", flush=True)
    for name in sorted(["accumulate_allreduce", "bf16", "exit_note", "load", "world_size"]):
        dots = "." * (48 - len(name))
        print(f"  {name} {dots} {DISK if name == 'exit_note' else 'None'}", flush=True)
    print("-------------------- end of arguments ---------------------", flush=True)


def trl_completions():
    from trl.trainer.utils import print_prompt_completions_sample

    prompts = ["What does this mean? " + OOM, "Explain the disk"]
    answers = [DISK + " means that it is full", DIED + "\nThe actor died."]
    print_prompt_completions_sample(prompts, answers, {"length": [1.0, 2.0]}, [0.1, 0.2], 3)


def verl_samples():
    # As verl/workers/reward_manager/naive.py prints them.
    for answer in (f"The log says\n{OOM}\nso lower the batch size.", DISK):
        print("[prompt]", f"user\nWhy did my run stop? {DIED}\nassistant\n")
        print("[response]", answer)
        print("[ground_truth]", "42")
        print("[score]", 0.0)


def chat_markers():
    text = f"<|im_start|>user\nWhat is {DISK}?<|im_end|>\n<|im_start|>assistant\n"
    print("sample:", repr(text + OOM))
    print("[INFO:swift] [INPUT] " + text + OOM + "\nThat is all.<|im_end|>")
    print("[INFO:swift] [LABELS] [-100 * 20]" + OOM)


def deepspeed_command():
    # As deepspeed/launcher/runner.py logs it.
    print(
        "[2026-11-21 10:00:00,123] [INFO] [runner.py:571:main] cmd = /usr/bin/python -u -m "
        "deepspeed.launcher.launch --master_port=29500 train.py --note " + repr(DISK)
    )


def called_process():
    command = [sys.executable, "-c", "raise SystemExit(3)", "--note", DIED]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
