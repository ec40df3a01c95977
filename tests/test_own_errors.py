"""What Python and torch say of a program's own code names no cause by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gkd.diagnosis import catalogue, logs

CATALOGUE = catalogue.load()
LEVELS = ("", "ERROR ")
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
KeyError: 'phi'
KeyError: 'llama'
AttributeError: 'Game' object has no attribute 'inference_engine'
AttributeError: 'Game' object has no attribute 'vllm_engine'
subprocess.CalledProcessError: Command '['gcc', 'answer_3.c', '-o', 'a.out']' \
returned non-zero exit status 1.
subprocess.CalledProcessError: Command '['g++-12', 'answer_3.cpp']' returned non-zero \
exit status 1.
subprocess.CalledProcessError: Command '['clang++', 'solution.cpp']' returned \
non-zero exit status 1.
subprocess.TimeoutExpired: Command '['python', 'answer.py']' timed out after 10 seconds
subprocess.CalledProcessError: Command '['git', 'apply', 'patch.diff']' returned \
non-zero exit status 128.
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
ValueError: the weights table's header promises 4 rubric columns
ValueError: rubric weights: a shard is missing a criterion
RuntimeError: the level's checkpoint is corrupted by the boss
JudgeError: Value error, Expecting value: line 1 column 1 (char 0) in the judge's reply
ValueError: It looks like the config file at 'game/scenario.json' is not a valid JSON \
file.
ValueError: puzzle piece 4 was rejected because the shapes did not match
ValueError: the map does not match the current world size of the simulator
ValueError: Mismatch in number of layers between the two drawings
ValueError: Shape mismatch for key 'pixel_values' in the observation
RuntimeError: weight helpfulness does not exist in the rubric
ValueError: Repo id must be in the form owner/name for a SWE task
ToolError: image judge:3 does not exist locally
ValueError: No valid checkpoint on the race track
ValueError: can't find images files in directory 'assets'
ValueError: the book's index references missing files 3 and 4
ValueError: Can't load config for 'maze-v3'
GameError: Cannot save checkpoint while the game is in battle
RuntimeError: Parent directory /repo/src does not exist in the agent's sandbox
RuntimeError: Worker failure: agent 3 could not write its answer
TimeoutError: judge 3 timed out in blocking wait for the browser
TimeoutError: Timed out waiting on barrier on level 3
TimeoutError: browser notify wait timeout after 30 s
RuntimeError: No interface found for class Judge
TypeError: Unable to find interface for: Judge
ValueError: Received data size doesn't match expected size of the screenshot
ValueError: street Address already in use by account 7
RuntimeError: Connection refused
RuntimeError: Connection timed out
ValueError: the list of jobs does not match num_processes of the factory
ValueError: 5 slots but only 3 books fit
ValueError: tiles must equal world_size (8, 8) of the map
ValueError: EvaluationStrategy of the essay requires a judge
ValueError: lights should be turned off when leaving the room
ValueError: the plug only accepts a single adapter
ValueError: Adapter with name sqlite already exists
RuntimeError: No adapter loaded. Please load a database adapter
ValueError: You cannot cast a spell twice
RuntimeError: the shop does not expose its development endpoints
ValueError: a reason must be provided for move 3
ValueError: the colour of the piece must be specified
ToolError: the following arguments are required: city
ToolCallError: get_weather is missing required argument 'city'
ToolCallError: search() missing required parameter query
AnswerError: score: Field required
ValueError: 'verdict' is a required property of the judge's reply
ValueError: misaligned address in the letter template
ValueError: Expected to read a Parquet file name from the user
ToolError: Failed to read file 'src/package.json' for the agent
ValueError: Trailing data in the answer of the model
IndexError: card 0 is out of bounds for size 0
ToolError: path database.json does not exist
FileNotFoundError: Directory /sandbox/out not found
ValueError: Couldn't resolve pattern of the quilt
ValueError: /repo/link is not a regular file
TimeoutError: sandbox worker did not respond in 30 s
ValueError: Bad split: the pizza has 7 slices
ValueError: All columns must have values of the same length in the table of scores
RuntimeError: No space left on device 3 of the puzzle
RuntimeError: Disk quota exceeded for tenant demo of the simulated cloud
ValueError: error in the answer: it says the disk is full
ValueError: Row remapping of the score table failed
RuntimeError: hardware stack error is not one of the choices
MemoryError: scratchpad of agent 2 is full
LoginError: Invalid username or password in the web task
RuntimeError: Couldn't reach http://judge:8000/score
ToolError: Network connection failed. Check your internet connection
ValueError: No GPU found in the answer's shopping list
ToolError: plug B is of type C, which is incompatible. Choose another one
ToolError: plugin calculator is not installed. Please install it from the store
AttributeError: attribute score of the answer is not writable
ValueError: handwriting cannot be read by the judge
ToolError: Too many open files in the editor, close a tab
ValueError: Invalid value 'blue' for COLOR
RuntimeError: the lunch never reached the workers
ValueError: the task requires you to execute three moves
ValueError: Unrecognized model in the catalogue of cars
NotImplementedError: Unknown architecture baroque
RuntimeError: The actor is dead because the boss hit him
RuntimeError: the worker died unexpectedly before finishing the bridge
ValueError: the owner has died in case 4 of the law exam
RuntimeError: search node was terminated by pruning
ValueError: Could not connect to the address of the web shop
ValueError: Malformed address: Elm Street
RuntimeError: patient 4 has missed too many heartbeats
ValueError: score 3 does not match persisted value 4
ValueError: Invalid redis address of the replay service
ActionError: Failed to put object on the table
ToolError: Timed out waiting for file report.pdf
RuntimeError: Failed to get node info of the knowledge graph
ValueError: Failed to register worker Bob in the payroll
ValueError: Package size (80 cm) exceeds the maximum size of 60 cm
ToolError: Parameter name mismatch: city and town
ValueError: rubric weights were not applied to answer 3
RuntimeError: [Server Error] the web shop returned 500
TimeoutError: Timeout waiting for server sandbox-3
StateError: Operation cannot be accomplished in current state of the order
ValueError: No filter named 'warm' in the photo editor
ValueError: expected `,` or `}` in the answer's JSON
ValueError: the student's vocabulary test must have 20 words
ValueError: sentence pairs that use the same tokenizer are not scored
ValueError: the brewery's batch size must be divisible by the barrel
ValueError: batch size of cookies should be greater than a dozen
ValueError: Batch size of dough has to be greater than 0
ValueError: inexact division of 7 apples by 2
ValueError: one hour is insufficient for whitening
ValueError: these slides have no gradient background
ValueError: Manual wrapping with ribbon is not allowed
ValueError: all the devices in the same node of the smart home need names
ValueError: parameter x of the spreadsheet is not finite
ValueError: weights of the portfolio: row 3 contains NaN
ValueError: the essay names no Attention sinks
RuntimeError: Graph capture failed: the plot window is closed
RuntimeError: operation failed due to a previous error during capture of the screen
ToolError: Error in codegen for task 3
RuntimeError: this camera's capture mode does not support HDR
RuntimeError: Scheduler hit an exception in cron job 3
TimeoutError: gave up on the web server to become ready
RuntimeError: container web-4 failed to become healthy within timeout
TimeoutError: sandbox child did not signal ready within 10 s
ValueError: a colour palette is not supported for quantization
ValueError: Unsupported activation scheme of the credit card
ValueError: Memory pool is not empty of cards
ValueError: 17 is not divisible by 3
ValueError: the answer 12.5 is not divisible by 5
ValueError: the cake is too large to fit in the bucket
ValueError: unknown parameter name in the physics formula
RuntimeError: Rollout mode of the carpet is unknown
ValueError: is a named pipe the right answer?
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
the two opinions diverged at step 3 of the debate
bridge simulator: reward 0, the bridge collapsed
task 4 explains mode collapse of GANs
task 7 is about a possible memory leak in C
the teacher at the school refused to answer
[reward] input column age contains NaN, filled with 0
[reward] weight of item 3 is not finite, item left out
[solver] status INFEASIBLE, reward 0
[calendar] meeting 4 cannot be scheduled, reward 0
[graph] No nodes available to expand
[sandbox] Failed to register worker 4, trying again
[tool] Timed out waiting for file report.pdf
[graph] Failed to get node info of entity 3
[news] the node failed to start its engine, says the article
[sandbox] worker 4 exited on signal 7 (Bus error)
[db] Connection was likely closed, opened again
[quiz] system not yet initialized is the right answer
[web] server was started with 3 workers
[sandbox] killed due to memory pressure (OOM): answer 3
[sandbox] Context is not active: page 3
[quiz] task docs:3 blocked for more than 2 hours by a review
[game] Termination timeout of level 3 exceeded. Exiting to ensure fairness
[nfs quiz] server not responding, still trying is answer B
"""
# The same without a level.
PRINTED = """
[sandbox] answer 5: MemoryError
[sandbox] answer 3: ModuleNotFoundError: No module named 'sympyy'
[sandbox] answer 4: FileNotFoundError: [Errno 2] No such file or directory: \
'config.json'
[sandbox] answer 7: OSError: [Errno 28] No space left on device
[sandbox] answer 2: PermissionError: [Errno 13] Permission denied: '/etc/shadow'
[sandbox] bash: /root/x: Permission denied
[sandbox] answer 9: OSError: [Errno 98] Address already in use
[sandbox] answer 3: main.c:1:10: fatal error: graph.h: No such file or directory
[sandbox] sh: 1: gcc: not found
[sandbox] answer: ImportError: cannot import name 'gcd' from 'fractions' \
(/usr/lib/python3.11/fractions.py)
[sandbox] AttributeError: module 'numpy' has no attribute 'integer_sqrt'
[sandbox] ERROR: No matching distribution found for graphlib9
[sandbox] pip: foo 1.0 requires bar<2, but you have bar 3.0 which is incompatible.
[swe] error: subprocess-exited-with-error
[sandbox] OSError: [Errno 24] Too many open files
[sandbox] RecursionError: maximum recursion depth exceeded
[sandbox] Segmentation fault (core dumped)
[sandbox] worker did not respond, starting another
[tool] git: error: unrecognized arguments: --force-all
[tool] convert: error: argument --size: invalid int value: 'big'
[judge] answer 4 rejected: Field required
[judge] hostname api.example.com: Name or service not known, using the cache
[judge] retry array 3: AuthenticationError
[Server Error] the judge returned 500, asking again
[solver] status INFEASIBLE, reward 0
[calendar] meeting 4 cannot be scheduled, reward 0
[graph] No nodes available to expand
[game] Insufficient resources to build a barracks
[env] torch.cuda.is_available() returned False on the driver, as expected
[web] Address already in use, taking port 8081
[web] login failed: Invalid username or password
[shop] order 7: Field required
[rubric] rubric weights were not applied to answer 3
[math] 17 is not divisible by 3, answer is wrong
[robot] Failed to put object on the table, reward 0
[agent 3] Failed to read file 'src/package.json'
[agent 3] plugin calculator is not installed. Please install it from the store
[agent 3] The actor is dead because the boss hit him
tool_result: {"error": "the following arguments are required: city"}
tool call failed: get_weather is missing required argument 'city'
unit test 3 of answer 7 failed: ValueError: 17 is not divisible by 3
stderr of candidate 2: MemoryError
candidate 4 printed: Killed
answer 12 exited with code 137
completion 3 raised ModuleNotFoundError: No module named 'networkxx'
Traceback of answer 3: ZeroDivisionError, reward 0
Readiness probe failed: HTTP probe failed with statuscode: 503, waiting
mc: <ERROR> Unable to stat bucket logs, skipped
dask: Worker tcp://10.0.0.4:1 failed to heartbeat; restarted
mlflow: run not found, a new one was made
redis: Could not connect to the address, trying the replica
jax: No GPU/TPU found, falling back to CPU.
playwright: page did not respond in 30000ms, reloaded
uvicorn.error: shutdown: connection reset by peer
kubelet: pod sandbox-4 OOMKilled, replaced
"""
# What libraries say of a request, an answer or a template of the program's own.
OF_LIBRARIES = """
jsonschema/validators.py | jsonschema.exceptions.ValidationError: 'score' is a \
required property
jsonschema/validators.py | jsonschema.exceptions.ValidationError: Additional \
properties are not allowed ('note' was unexpected)
requests/models.py | requests.exceptions.HTTPError: 401 Client Error: Unauthorized \
for url: https://judge.example.com/v1/score
requests/models.py | requests.exceptions.HTTPError: 403 Client Error: Forbidden for \
url: http://sandbox:8080/run_code
jinja2/environment.py | jinja2.exceptions.UndefinedError: 'city' is undefined
jinja2/environment.py | jinja2.exceptions.TemplateSyntaxError: unexpected '}'
filelock/_api.py | filelock.Timeout: The file lock 'sandboxes/7.lock' could not be \
acquired.
docker/errors.py | docker.errors.NotFound: 404 Client Error: Not Found ("No such \
container: judge-3")
sqlalchemy/engine/default.py | sqlalchemy.exc.OperationalError: \
(sqlite3.OperationalError) no such column: score
playwright/_impl/_connection.py | playwright._impl._errors.TimeoutError: Timeout \
30000ms exceeded.
openai/_base_client.py | openai.AuthenticationError: Error code: 401 - {'error': \
{'message': 'Incorrect API key provided'}}
sklearn/utils/validation.py | sklearn.exceptions.NotFittedError: This \
LogisticRegression instance is not fitted yet.
sklearn/utils/validation.py | ValueError: Input X contains NaN.
gymnasium/envs/registration.py | gymnasium.error.NameNotFound: Environment `Maze` \
doesn't exist.
sympy/polys/polytools.py | sympy.polys.polyerrors.ExactQuotientFailed: x**2 + 1 does \
not divide x + 2 in ZZ
matplotlib/axis.py | matplotlib.units.ConversionError: Failed to convert value(s) to \
axis units: 'a'
"""
# What a program's own checks say of a cause, and are right.
CHECKS = """
train.nan | FloatingPointError: loss is NaN at step 12
train.nan | ValueError: Loss is not finite: nan, stopping
train.nan | AssertionError: grad_norm is not finite at step 40
train.nan | RuntimeError: policy logits contain NaN
data.empty | ValueError: Train dataset is empty
data.empty | ValueError: Dataset is empty after filtering overlong prompts
data.empty | AssertionError: Train dataloader is empty!
data.empty | ValueError: the training dataset is empty
tokenizer.pad-token | ValueError: tokenizer has no pad token
train.batch-size | ValueError: train_batch_size (7) must be divisible by the number \
of GPUs (2)
train.batch-size | AssertionError: ppo_mini_batch_size 12 is not divisible by \
micro_batch_size 5
tokenizer.pad-token | AssertionError: tokenizer must have a pad token
tokenizer.pad-token | ValueError: pad_token_id is not set
tokenizer.chat-template | ValueError: tokenizer.chat_template is not set
tokenizer.chat-template | ValueError: Qwen/Qwen3-0.6B-Base has no chat template
tokenizer.vocab-mismatch | ValueError: student and teacher must share the same \
vocabulary
tokenizer.vocab-mismatch | ValueError: teacher vocab_size 152064 does not match \
student vocab_size 151936
comm.port-in-use | RuntimeError: Port 8000 is already in use
comm.world-size | ValueError: world_size (6) is not divisible by tensor_parallel_size \
(4)
env.no-gpu | RuntimeError: No GPU found
env.no-gpu | RuntimeError: CUDA is not available
env.disk-full | RuntimeError: Not enough free disk space for the checkpoint: 12 GB \
needed
env.disk-full | RuntimeError: Insufficient disk space in /ckpt
cuda.oom | RuntimeError: rollout worker 3 failed: torch.OutOfMemoryError: CUDA out of \
memory. Tried to allocate 2.00 GiB
vllm.kv-cache | RuntimeError: engine did not start: ValueError: No available memory \
for the cache blocks. Try increasing `gpu_memory_utilization`
vllm.engine-start-timeout | TimeoutError: vLLM server did not become ready within 600 s
vllm.engine-start-timeout | RuntimeError: vLLM server failed to start within 300 seconds
sync.stuck | TimeoutError: weight sync did not finish within 300 s
sync.stuck | TimeoutError: Weight transfer timed out after 120 s
sync.not-applied | RuntimeError: weight version mismatch: engine has 3, trainer has 4
sync.not-applied | AssertionError: checksum mismatch after weight sync
sync.name-or-shape | ValueError: Parameter shape mismatch: \
model.layers.0.mlp.up_proj.weight (64, 32) vs (32, 64)
checkpoint.missing | FileNotFoundError: Checkpoint directory /ckpt/global_step_20 \
does not exist
checkpoint.missing | ValueError: No checkpoint found at /ckpt/last
checkpoint.save-failed | RuntimeError: Failed to save checkpoint to /ckpt/global_step_20
checkpoint.corrupt | RuntimeError: Checkpoint is corrupted: /ckpt/global_step_20
checkpoint.mismatch | ValueError: checkpoint was saved with a different world size \
(8, now 4)
data.file-missing | FileNotFoundError: train file data/train.parquet does not exist
data.schema | KeyError: "Column name ['prompt'] not in the dataset. Current columns \
in the dataset: ['text']"
config.missing-value | ValueError: actor.model.path must be specified
config.missing-value | ValueError: teacher_model must be provided
config.unknown-option | ValueError: Unknown config key: actor.lr_schedule
config.invalid-combination | ValueError: use_kl_loss and use_kl_in_reward are \
mutually exclusive
teacher.unreachable | ConnectionError: teacher server at 10.0.0.4:15555 is not reachable
teacher.unreachable | RuntimeError: Teacher server failed to start
teacher.protocol | ValueError: teacher_logprobs has shape (4, 8), expected (4, 16)
train.no-grad | ValueError: no trainable parameters
train.no-grad | AssertionError: parameters did not move after the step
data.too-long | ValueError: Prompt length 3127 is longer than 1024
vllm.max-model-len | ValueError: max_model_len must be larger than max_prompt_length \
+ max_response_length
vllm.tp-divisibility | ValueError: num_attention_heads (14) must be divisible by \
tensor parallel size (4)
env.package-missing | ImportError: flash_attn is not installed. Please install it \
with `pip install flash-attn`
ray.no-resources | ValueError: Total available GPUs 4 is less than total desired GPUs 8
train.diverged | RuntimeError: KL divergence exploded at step 90
comm.env-missing | RuntimeError: LOCAL_RANK is not in the environment
env.variable-not-propagated | RuntimeError: NCCL_SOCKET_IFNAME is set in the driver \
but not in the workers
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


@pytest.mark.parametrize("line", OF_LIBRARIES.strip().splitlines())
def test_what_a_library_says_of_an_answer_names_no_cause(
    line: str, tmp_path: Path
) -> None:
    file, message = line.split(" | ", 1)
    log = tmp_path / "run.log"
    inner = f'  File "/opt/site-packages/{file}", line 8, in ask\n    raise error\n'
    of_own = raised(message, "compute_reward")
    log.write_text(STEPS + of_own.replace(message, inner + message))
    report = logs.examine([log], CATALOGUE)
    assert [one.cause for one in report.causes] == []


@pytest.mark.parametrize("line", CHECKS.strip().splitlines())
def test_a_check_of_ones_own_in_the_words_of_the_field_names_its_cause(
    line: str, tmp_path: Path
) -> None:
    cause, message = line.split(" | ", 1)
    log = tmp_path / "run.log"
    log.write_text(STEPS + raised(message, "main").replace("x = f(k)", "raise wrong"))
    report = logs.examine([log], CATALOGUE)
    assert report.causes[0].cause == cause


@pytest.mark.parametrize(
    "told",
    [f"INFO {one}" for one in TOLD.strip().splitlines()]
    + [level + one for one in PRINTED.strip().splitlines() for level in LEVELS],
)
def test_a_line_of_information_with_a_rules_words_names_no_cause(
    told: str, tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    at = "2026-11-26 10:00:12,100 " if told.startswith(("INFO", "ERROR")) else ""
    log.write_text(
        f"{STEPS}{at}{told}\n"
        + raised("ZeroDivisionError: division by zero", "compute_reward")
    )
    report = logs.examine([log], CATALOGUE)
    assert [one.cause for one in report.causes] == []
