"""Distillation by Ray actors (rollout workers, a teacher, a trainer) with steps.py."""

import argparse
import logging
import time

import ray
import steps
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--rollouts", type=int, default=2)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--cpus", type=float, default=0.5)
parser.add_argument("--gpus", type=float, default=0)
parser.add_argument("--bundles", type=int, default=0)
parser.add_argument("--restarts", type=int, default=0)
parser.add_argument("--retries", type=int, default=0)
parser.add_argument("--timeout", type=float, default=None)
parser.add_argument("--pull", action="store_true", help="rollouts fetch the weights themselves")
parser.add_argument("--quiet", action="store_true")
parser.add_argument("--pace", type=float, default=0.2)
args = parser.parse_args()
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s:%(lineno)d -- %(message)s")
log = logging.getLogger("driver")


def tell(text):
    if not args.quiet:
        print(text, flush=True)


class RolloutWorker:
    def __init__(self, trainer):
        self.model, self.trainer = steps.build_rollout(32), trainer
        tell("rollout engine ready")

    def update_weights(self, state=None):
        state = state or ray.get(self.trainer.get_weights.remote())
        self.model.load_state_dict(state)

    def generate_sequences(self, ids):
        return steps.generate_sequences(self.model, ids)

    def count(self):
        return sum(one.numel() for one in self.model.parameters())


class TeacherWorker:
    def __init__(self):
        self.model = steps.build_teacher(32)
        tell("teacher ready")

    def compute_log_prob(self, ids):
        return steps.compute_log_prob(self.model, ids)


class TrainerWorker:
    def __init__(self):
        self.model, self.optimizer = steps.build_actor(32, 1e-3)
        tell("actor model built")

    def get_weights(self):
        return self.model.state_dict()

    def push_weights(self, workers):
        tell(f"pushing weights to {len(workers)} rollout workers")
        ray.get([one.update_weights.remote() for one in workers])

    def update_actor(self, ids, wanted):
        return steps.update_actor(self.model, self.optimizer, ids, wanted)

    def save_checkpoint(self, step):
        tell(f"saving checkpoint of step {step}")
        steps.save_checkpoint(self.model, self.optimizer, step, f"out/step_{step}")


def get(*calls):
    """The answers, asked for again where an actor failed."""
    for attempt in range(args.retries + 1):
        try:
            return ray.get([one() for one in calls], timeout=args.timeout)
        except (ray.exceptions.RayError, OSError) as error:
            if attempt == args.retries:
                raise
            log.warning("attempt %d of %d failed: %s", attempt + 1, args.retries + 1, error)
            time.sleep(1)


def start():
    options = {"num_cpus": args.cpus, "num_gpus": args.gpus, "max_restarts": args.restarts}
    if args.bundles:
        log.info("creating a placement group of %d bundles", args.bundles)
        group = placement_group([{"CPU": 1}] * args.bundles, strategy="STRICT_PACK")
        ray.get(group.ready())
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
    make = lambda kind, *given: ray.remote(kind).options(**options).remote(*given)
    trainer = make(TrainerWorker)
    rollouts = [make(RolloutWorker, trainer) for _ in range(args.rollouts)]
    teacher = make(TeacherWorker)
    log.info("waiting for %d rollout workers", args.rollouts)
    get(*(one.count.remote for one in rollouts))
    return trainer, rollouts, teacher


def main():
    rows = steps.load_dataset("prompts.jsonl")
    log.info("dataset len: %d", len(rows))
    trainer, rollouts, teacher = start()
    for step in range(1, args.steps + 1):
        begin = time.time()
        if args.pull:
            get(lambda: trainer.push_weights.remote(rollouts))
        else:
            state = trainer.get_weights.remote()
            get(*(lambda one=one: one.update_weights.remote(state) for one in rollouts))
        sync = time.time() - begin
        ids = steps.next_batch(rows, step)
        full = get(*(lambda one=one: one.generate_sequences.remote(ids) for one in rollouts))[0]
        [wanted] = get(lambda: teacher.compute_log_prob.remote(full))
        [(loss, norm)] = get(lambda: trainer.update_actor.remote(full, wanted))
        time.sleep(args.pace)
        log.info(f"step:{step} - actor/kl_loss:{loss:.4f} - actor/grad_norm:{norm:.4f} - timing_s/update_weights:{sync:.3f} - timing_s/step:{time.time() - begin:.3f}")
        if step % 5 == 0:
            get(lambda: trainer.save_checkpoint.remote(step))
    log.info("training finished after %d steps", args.steps)


if __name__ == "__main__":
    ray.init(num_cpus=4, object_store_memory=100 * 1024 * 1024, include_dashboard=False)
    main()
    ray.shutdown()
