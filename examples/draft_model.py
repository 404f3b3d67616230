"""A draft head for speculative decoding, in EAGLE's manner, and what it is for: accepted tokens.

A small decoder learns Python source text, one byte a token. The draft head predicts the decoder's
next hidden state from its last one and the next token's embedding, and from its own predictions
after that; the decoder's LM head turns states into tokens. It learns several steps ahead, step s
weighted γˢ. Then the decoder checks drafts by exact speculative sampling (Leviathan et al., 2023):
it keeps each drafted token with probability min(1, p/q) up to the first rejection.
"""

import argparse
import email
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fastkd import Divergence, Head, hidden_state_loss, linear_soft_target_loss

AHEAD, GAMMA, VOCABULARY, LENGTH, ROWS = 4, 0.8, 128, 96, 16


class DraftHead(nn.Module):
    """The next hidden state, from the last one and the embedding of the token between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(
            nn.LayerNorm(2 * width), nn.Linear(2 * width, 4 * width), nn.GELU(),
            nn.Linear(4 * width, width),
        )  # fmt: skip

    def forward(self, state: Tensor, embedding: Tensor) -> Tensor:
        return state + self.mix(torch.cat([state, embedding], -1))


def source_text() -> Tensor:
    """Source text of the standard library's package for e-mail, as ASCII codes."""
    files = sorted(Path(email.__path__[0]).rglob("*.py"))
    codes = b"".join(path.read_bytes() for path in files)
    return torch.tensor([code for code in codes if code < VOCABULARY])


def rows(text: Tensor, count: int) -> Tensor:
    starts = torch.randint(len(text) - LENGTH, (count, 1))
    return text[starts + torch.arange(LENGTH)]


def train_decoder(text: Tensor, steps: int, count: int = ROWS) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    decoder = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1)
    for _ in range(steps):
        batch = rows(text, count)
        decoder(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return decoder.requires_grad_(False).eval()


def train_draft(
    decoder: LlamaForCausalLM,
    text: Tensor,
    steps: int,
    divergence: Divergence,
    gamma: float = GAMMA,
    count: int = ROWS,
    state_weight: float = 0.1,
) -> DraftHead:
    """A draft head whose predictions 1 to AHEAD steps ahead follow the decoder's.

    The hidden states themselves weigh ``state_weight``, as in EAGLE; EAGLE-3 leaves them out.
    """
    draft, head = DraftHead(decoder.config.hidden_size), Head.of(decoder)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps + 1)
    for step in range(steps):
        batch = rows(text, count)
        with torch.no_grad():
            states = decoder.model(batch).last_hidden_state  # (B, N, D)
        embedded, predicted, drafted, taught = decoder.model.embed_tokens(batch), states, [], []
        for ahead in range(1, AHEAD + 1):
            predicted = draft(predicted[:, :-1], embedded[:, ahead:])
            drafted.append(predicted[:, : LENGTH - AHEAD])
            taught.append(states[:, ahead : ahead + LENGTH - AHEAD])
        ours, theirs = torch.stack(drafted), torch.stack(taught)  # (AHEAD, B, N − AHEAD, D)
        weights = (gamma ** torch.arange(AHEAD))[:, None, None].expand(ours.shape[:-1])
        soft = linear_soft_target_loss(
            ours, head, theirs, head, divergence=divergence, weights=weights
        )
        near = hidden_state_loss(ours, theirs, kind="smooth_l1", weights=weights)
        loss = soft + state_weight * near
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % max(steps // 5, 1) == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    return draft


@torch.no_grad()
def accepted_tokens(
    decoder: LlamaForCausalLM, draft: DraftHead, text: Tensor, contexts: int, drafts: int = 6
) -> Tensor:
    """Number of ``drafts`` drafted tokens that speculative sampling accepts, of each context."""
    context = rows(text, contexts)
    output = decoder(context, output_hidden_states=True)
    state = output.hidden_states[-1][:, -1]
    token = output.logits[:, -1].softmax(-1).multinomial(1)  # the decoder's own next token
    tokens, q = [token], []
    for _ in range(drafts):
        state = draft(state, decoder.model.embed_tokens(tokens[-1][:, 0]))
        q.append(decoder.lm_head(state).softmax(-1))
        tokens.append(q[-1].multinomial(1))
    logits = decoder(torch.cat([context, *tokens], 1)).logits[:, LENGTH:-1]
    drafted = torch.cat(tokens[1:], 1)[..., None]
    ratio = logits.softmax(-1).gather(-1, drafted) / torch.stack(q, 1).gather(-1, drafted)
    kept = torch.rand(contexts, drafts) < ratio[..., 0]
    return kept.long().cumprod(1).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--decoder-steps", type=int, default=1500)
    parser.add_argument("--draft-steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=ROWS, help="of a batch")
    parser.add_argument("--contexts", type=int, default=1024)
    parser.add_argument("--divergence", default="total_variation")
    options = parser.parse_args()
    torch.manual_seed(0)
    text = source_text()
    learnt, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    decoder = train_decoder(learnt, options.decoder_steps, options.rows)
    untrained = accepted_tokens(
        decoder, DraftHead(decoder.config.hidden_size), held_out, options.contexts
    )
    print(f"before: accepted tokens a draft of 6: {untrained.float().mean().item():.2f}")
    divergence = Divergence(options.divergence)
    draft = train_draft(decoder, learnt, options.draft_steps, divergence, count=options.rows)
    found = accepted_tokens(decoder, draft, held_out, options.contexts).float()
    error = found.std().item() / len(found) ** 0.5
    print(f"standard error of the mean below: {error:.2f}")
    print(f"after: accepted tokens a draft of 6: {found.mean().item():.2f}")


if __name__ == "__main__":
    main()
