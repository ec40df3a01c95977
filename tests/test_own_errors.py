"""What Python and torch say of a program's own code names no cause by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gkd.diagnosis import catalogue, logs

CATALOGUE = catalogue.load()
STEPS = "step 1/10 loss 2.1\nstep 2/10 loss 2.0\n"
MESSAGES = """
KeyError: 'alpha'
KeyError: 'text'
KeyError: 'vllm'
KeyError: 'optimizer'
KeyError: 'layer.0.weight'
IndexError: list index out of range
AttributeError: 'Runner' object has no attribute 'alpha'
AttributeError: 'NoneType' object has no attribute 'shape'
AttributeError: 'str' object has no attribute 'get'
AttributeError: property 'alpha' of 'Runner' object has no setter
AttributeError: Can't pickle local object 'make.<locals>.inner'
TypeError: run() got an unexpected keyword argument 'alpha'
TypeError: Runner.__init__() got an unexpected keyword argument 'alpha'
TypeError: run() missing 1 required positional argument: 'alpha'
TypeError: 'NoneType' object is not subscriptable
TypeError: string indices must be integers, not 'str'
TypeError: expected string or bytes-like object, got 'NoneType'
TypeError: '<' not supported between instances of 'str' and 'int'
ValueError: too many values to unpack (expected 2)
ValueError: could not convert string to float: 'abc'
ValueError: max() arg is an empty sequence
ValueError: expected sequence of length 3 at dim 1 (got 2)
RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x8)
RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16
RuntimeError: The size of tensor a (4) must match the size of tensor b (3) at \
non-singleton dimension 1
RuntimeError: Expected all tensors to be on the same device, but found cuda:0 and cpu!
RuntimeError: Trying to backward through the graph a second time
RuntimeError: grad can be implicitly created only for scalar outputs
RuntimeError: torch.cat(): expected a non-empty list of Tensors
RuntimeError: stack expects each tensor to be equal size, but got [3] at entry 0 and \
[4] at entry 1
AssertionError: expected 4 rows, got 3
FileNotFoundError: [Errno 2] No such file or directory: 'abc.txt'
ZeroDivisionError: division by zero
EOFError: Ran out of input
ImportError: cannot import name 'alpha' from 'helpers' (/job/own/helpers.py)
ImportError: attempted relative import with no known parent package
ModuleNotFoundError: No module named 'own.helpers'
requests.exceptions.ReadTimeout: HTTPConnectionPool(host='svc', port=80): timed out
concurrent.futures.process.BrokenProcessPool: A process was terminated abruptly
Fatal Python error: Segmentation fault
"""

# Each has the words of a broad rule, in a sentence that means something else.
OWN_WORDS = """
ValueError: the plot of FSDP runs needs at least two series
RuntimeError: no results for fsdp in table.csv
RuntimeError: benchmark DeepSpeed has no finished trial
ValueError: prompt 3 mentions Megatron and was filtered out
RuntimeError: the scheduler is not initialized
ValueError: the expert panel of judges must have three members
RuntimeError: routing table cannot find service judge-2
AssertionError: rouge per_expert annotations missing for row 7
ValueError: the judge timed out the debate after 4 rounds
ValueError: inconsistent number of turns: 3 and 4
AssertionError: answer appears not to match the rubric
ValueError: labels are not the same across ranks of annotators
ValueError: task EL0004: wrong answer format
ValueError: yarn.lock' is not a lock file
TypeError: normalize_reward() missing 1 required positional argument: 'scale'
ValueError: tool call error: the model said Access is denied
ValueError: 'weight' must be 2-D for this plot
ValueError: rank 7 >= world_size 4 in the ranking of worlds
ValueError: export to results.csv is missing a header
ValueError: number of input clauses exceeds the limit of the solver
AssertionError: token bucket exceeded its max rate
ValueError: the patch must be installed on the robot first
RuntimeError: tool 'search' is not installed in agent 4
ValueError: Teacher forcing ratio expected in [0, 1], got 1.5
AssertionError: essay of the teacher has length 0
AssertionError: batch of letters
RuntimeError: wake_up alarm of the simulator is not set
ValueError: expected 8 ranks of cards but only 5 were dealt
RuntimeError: 4 processes in the diagram, but only 3 are labelled
ValueError: invalid rank of matrix
ValueError: the rank 3 is already taken by another player
ValueError: answer has error code 700 of the tax form
RuntimeError: simulated device ran out of memory cells
ValueError: error in question: a GPU was out of memory in the text
ParserError: unexpected bracket at 7
HeaderError: column width
ValueError: replay split for eval is empty at step 0
ValueError: aux_loss of head 2 is inf
ValueError: engine.py: no such gear
ValueError: score must be at least 0
ValueError: logprobs must be in log space
ValueError: At most 4 image(s) may be provided to the viewer
ValueError: Unknown dtype: money
ValueError: Unsupported task: juggling
RuntimeError: unhandled system error of the simulator
ValueError: Column name must be upper case: abc
ValueError: Columns ['a'] of the plot overlap
ValueError: the puzzle's state is 'Out Of Memory' in the game
AuthenticationError: user bob has no token
ValueError: Template card does not exist
ValueError: chat template 'debate' has no un-named side
ValueError: Token id 9 is out of vocabulary of the toy grammar
ValueError: batch of dough must be a multiple of 3 eggs
ValueError: VLLM_PORT is not in my table
ValueError: block_structure needs depth
ValueError: Model path in the maze does not exist
ValueError: game.sav is not a valid checkpoint
ValueError: world_size of the grid must be odd but is 4
AssertionError: world size is not equal to map size
ValueError: column of soldiers is missing a leader
ValueError: pin_memory game failed after 3 cards
ValueError: Template 'invoice' not found
ValueError: vocabulary of lesson 3 must not be empty
ValueError: vocab_size of student essay larger than of student 2
ValueError: Attention backend of the robot is off
ValueError: Head size 12 is not supported by the helmet
ValueError: number of processes does not match the flow chart
ValueError: the two answers are incompatible with each other
AssertionError: both players cannot move at the same time
ValueError: tensor layout of reward is not compatible with mask
ValueError: when using the hammer, a nail is required when using
ValueError: this joke only works with an audience
ValueError: unknown key in the song: H sharp
ValueError: the trajectory is truncated at 400
ValueError: this recipe requires eggs >= 3
ValueError: batch_size of bread must divide the flour
ValueError: weights of the barbell set are missing
ValueError: unknown option 'E' in question 4
ValueError: game error: unknown flag of country
ValueError: the error of Grace Hopper requires compute capability in trivia
ValueError: read 12 bytes failed
ValueError: Unsupported architecture: gothic
ValueError: Unsupported model: T-Ford
ValueError: load_weights of the scale is negative
AssertionError: teacher_topk plot needs k > 0
AssertionError: expected tensor(nan, grad_fn=None) to be handled
ValueError: Worker proc terminated is not a legal move
TimeoutError: RPC call to judge timed out
ValueError: quantization_config of colours must be 8 not 9
ValueError: Cannot find the config file for pipeline
ValueError: no file named notes.txt in the answer
AssertionError: rope is longer than max_prompt_length of the poem
ValueError: max_seq_len (4) larger than the snake
HTTPError: 403 Forbidden: Please log in to the wiki
PermissionError: user is not authenticated
ValueError: dress has requirement of size but is installed
ValueError: this level requires torch in the inventory
ValueError: Architecture baroque not supported
ValueError: the actor is unavailable on Sunday: Actor died in act 3
ValueError: camera does not exist on the cluster
RuntimeError: Failed to update weights of the moving average of prices
ValueError: capacity_factor must be cubic metres
ValueError: max_position_embeddings in the quiz should be less
ValueError: Tried to find treasure but folder does not exist
ValueError: prompt version mismatch: nccl chapter
TimeoutError: Socket Timeout of the judge
ValueError: The rendezvous of the two robots failed
ValueError: piece has been removed from the board
ValueError: player 2 has been replaced
ValueError: Prompt length 7 is longer than 5 words
ValueError: unexpected pos 3 vs 4 on the board
ValueError: Access to model city is restricted
ValueError: error in quiz: CUDA is not available as an answer
ValueError: NVIDIA driver named but no GPU found in the picture
ValueError: Feature type 'colour' not found
ValueError: file too short
RuntimeError: unable to mmap
ValueError: Architecture 'baroque' is not in the list
ValueError: this port is not compatible with vLLM names
"""
TOLD = """
[net] probe of ibv_devinfo failed: tool not installed, skipped
[doc] see hydra.errors.ConfigCompositionException in the manual
[eval] verifier step: unit test did not answer within its turn, score 0
[news] article says Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus
[docs] a GPU requires reset after error 48
Killed
[judge] the answer's program ended with: Segmentation fault
[sandbox] answer 3 ended by SIGBUS, reward 0
[notes] One of the subprocesses has abruptly died during map operation means memory
[c10d] torch/cuda/nccl.py", line 3 quoted
[doc] version GLIBC_2.34 not found is explained on page 4
[http] Connection reset by peer, trying again
[bench] last NCCL error in: none
[monitor] pod judge-2 has state OOMKilled 0 times
[page] PydanticUserError is documented
[server] Address already in use, taking the next one
[judge] answer failed with Assertion `x > 0` failed
[sandbox] answer 2: exit code 137
[sandbox] program was killed by signal 9
[grep] Error: NCCL error: internal error (0 hits)
[sandbox] exitcode  : 3 for answer 7
[hw] No GPU found, using the CPU
Waiting for 2 local engine core proc of the game
[hw] Failed to initialize NVML, power is not measured
[doc] torch._dynamo.exc.Unsupported is listed
[doc] SafetensorError means a damaged file
[doc] DeepEP timeout is 100 s
"""


def raised(message: str, function: str) -> str:
    return (
        "Traceback (most recent call last):\n"
        '  File "/job/own/go.py", line 60, in <module>\n'
        f"    {function}(1)\n"
        f'  File "/job/own/parts.py", line 20, in {function}\n'
        "    x = f(k)\n"
        f"{message}\n"
    )


@pytest.mark.parametrize("function", ["update_actor", "generate_sequences"])
@pytest.mark.parametrize("message", MESSAGES.strip().splitlines())
def test_an_error_of_ones_own_code_names_no_cause(
    message: str, function: str, tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    log.write_text(STEPS + raised(message, function))
    report = logs.examine([log], CATALOGUE)
    assert [one.cause for one in report.causes] == []
    assert report.verdict == "unknown"


@pytest.mark.parametrize("message", OWN_WORDS.strip().splitlines())
def test_a_text_that_ones_own_code_raises_is_no_librarys(
    message: str, tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    of_own = raised(message, "compute_reward").replace("x = f(k)", "raise wrong")
    log.write_text(STEPS + of_own)
    report = logs.examine([log], CATALOGUE)
    assert [one.cause for one in report.causes] == []


@pytest.mark.parametrize("told", TOLD.strip().splitlines())
def test_a_line_of_information_with_a_rules_words_names_no_cause(
    told: str, tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    log.write_text(
        f"{STEPS}2026-11-26 10:00:12,100 INFO {told}\n"
        + raised("ZeroDivisionError: division by zero", "compute_reward")
    )
    report = logs.examine([log], CATALOGUE)
    assert [one.cause for one in report.causes] == []
