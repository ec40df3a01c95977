# What a launch script prints of its commands; see prints.py.
set -x
export NOTE='OSError: [Errno 28] No space left on device'
true python3 -m verl.trainer.main_ppo trainer.notes="$NOTE" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    trainer.remark='torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 GiB is free.'
set +x
echo 'Running command: torchrun --nproc-per-node 8 train.py --note "OSError: [Errno 28] No space left on device"'
echo '$ accelerate launch train.py --note "OSError: [Errno 28] No space left on device"'
cat <<'TEXT'
torchrun --nproc-per-node 8 \
    --nnodes 2 \
    train.py \
    --note "OSError: [Errno 28] No space left on device" \
    --lr 1e-6
TEXT
