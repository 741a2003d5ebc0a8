"""Dr. GRPO by hand on DDP: the noise scale in prompts, the policy's entropy, and one report of both.

pip install '.[trl]'
torchrun --nproc-per-node 2 examples/dr_grpo_loop.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.demos.arithmetic import task  # a tiny model that learns to add; yours goes here

PROMPTS, MICRO_BATCHES, COMPLETIONS, LONGEST = 4, 2, 8, 6  # prompts of a micro-batch; tokens of the longest completion

dist.init_process_group("gloo")
rank, n_ranks = dist.get_rank(), dist.get_world_size()
tokenizer, sums = task.tokenizer(), task.dataset()
model = DistributedDataParallel(task.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


@torch.no_grad()
def respond(policy: nn.Module, rows: list[int], generator: torch.Generator | None = None) -> sonde.Rollouts:
    """Completions of these sums, with their advantages. Without a generator, torch's own random numbers are drawn."""
    policy = getattr(policy, "module", policy)
    questions = [sums[row]["prompt"] for row in rows for _ in range(COMPLETIONS)]
    prompt = tokenizer(questions, return_tensors="pt", padding=True)  # padding on the left
    ids, attention = prompt["input_ids"], prompt["attention_mask"]
    width, is_over, mask = ids.shape[1], torch.zeros(len(ids), dtype=torch.bool), []
    for _ in range(LONGEST):
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        logits = policy(input_ids=ids, attention_mask=attention, position_ids=positions).logits[:, -1]
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        mask.append(~is_over)
        ids = torch.cat([ids, torch.where(is_over, tokenizer.pad_token_id, token)[:, None]], 1)
        attention = torch.cat([attention, (~is_over).long()[:, None]], 1)
        is_over = is_over | (token == tokenizer.eos_token_id)
    answers = tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)
    right = [sums[row]["answer"] for row in rows for _ in range(COMPLETIONS)]
    reward = torch.tensor(task.reward(answers, right)).view(-1, COMPLETIONS)
    return sonde.Rollouts(
        {"input_ids": ids, "attention_mask": attention},  # what the model takes, prompts first
        mask=torch.stack(mask, 1),  # [completions, tokens]: the last columns of input_ids that the policy sampled
        prompt=torch.tensor(rows).repeat_interleave(COMPLETIONS),  # the same number for a prompt on every rank
        advantage=(reward - reward.mean(1, keepdim=True)).flatten(),  # Dr. GRPO does not divide by the scatter
        texts=dict(enumerate(sums["prompt"])),
    )


def loss_of(rollouts: sonde.Rollouts) -> torch.Tensor:
    """Dr. GRPO's loss on fresh completions: all tokens weigh the same, whatever the completion's length."""
    log_prob, _ = sonde.CausalLMStatistics()(model, rollouts)
    return -(rollouts.credit() * log_prob).sum() / (len(rollouts) * LONGEST)


log = sonde.RunLog(sonde.JsonlSink("runs/dr-grpo"), run="Dr. GRPO by hand")
noise = sonde.attach(model, optimizer, unit="prompts", log=log, every=1, per_example="never")  # pieces: whole groups
entropy = sonde.EntropyChangeProbe(model, optimizer, sonde.EntropyChangeOptions(micro_batch_prompts=16))
policy_log = sonde.PolicyLog(log)
own = torch.Generator().manual_seed(rank)  # of evaluation: the training draws the same numbers with and without sonde
torch.manual_seed(1000 + rank)

for step in range(1, 41):
    learned = []
    for _ in range(MICRO_BATCHES):
        rows = torch.randperm(80)[:PROMPTS].tolist()
        learned.append(respond(model, rows))
        with noise.piece(units=PROMPTS):
            (loss_of(learned[-1]) / MICRO_BATCHES).backward()
    noise.clip_grad_norm_(1.0)
    if step % 10 == 0:
        E = respond(model, list(range(80 + rank, 100, n_ranks)), own)
        with entropy.around_step(E) as around:
            optimizer.step()
        policy_log.measured(step, around.forecast.metrics(), around.forecast, E.texts)
        if rank == 0:
            print(f"step {step}: {around.forecast}")
    else:
        optimizer.step()
    optimizer.zero_grad()

if rank == 0:
    print(noise.reading())
policy_log.end("training ended")
noise.close()
entropy.close()
dist.destroy_process_group()
