"""Small real tokenizers, and templates of the structure that the common model families use."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tlora.core.sequence import IGNORED
from tlora.data.render import Renderer
from tlora.data.tokenise import Encoded, Encoder

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "How many singers are there? There are twelve singers in the hall.",
    "user assistant system tool Hello, how are you today? I am fine, thank you.",
]
SPECIAL = ["<|begin|>", "<|end|>", "<|turn|>", "<|header|>"]

# Every turn alike, a line break after the end token, as in ChatML.
TURNS = """\
{%- if tools %}<|turn|>system
Tools: {{ tools | tojson }}<|end|>
{% endif -%}
{%- for message in messages -%}
<|turn|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}[call {{ call.function.name }} \
{{ call.function.arguments.city }}]{% endfor -%}
<|end|>
{% endfor -%}
{%- if add_generation_prompt %}<|turn|>assistant
{% endif -%}"""

# A begin token, headers with a closing token, trimmed content, nothing after the end token.
HEADERS = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|header|>' + message.role + '<|turn|>\\n\\n' + message.content | trim + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|turn|>\\n\\n' }}{% endif -%}"""

# The system message stands inside the first user turn, and the assistant has another name.
MERGED_SYSTEM = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set opening = messages[0].content + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set opening = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('user and assistant must take turns') -}}{%- endif -%}
{{- '<|turn|>' + ('model' if message.role == 'assistant' else 'user') + '\\n' -}}
{{- (opening if loop.first else '') + message.content | trim + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|turn|>model\\n' }}{% endif -%}"""

# Thinking stays in answers after the last question only, where it is written even if there is none.
THINKING = """\
{%- set state = namespace(last=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{% set state.last = loop.index0 %}{% endif -%}{%- endfor -%}
{%- for message in messages -%}
{{- '<|turn|>' + message.role + '\\n' -}}
{%- set text = message.content.split('</think>')[-1].lstrip('\\n') -%}
{%- if message.role == 'assistant' and loop.index0 > state.last and loop.last -%}
{%- set thought = '' -%}
{%- if '</think>' in message.content -%}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip() -%}
{%- endif -%}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' + text -}}
{%- elif message.role == 'assistant' -%}{{- text -}}
{%- else -%}{{- message.content -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '[call ' + call.function.name + ']' -}}{%- endfor -%}
{{- '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif -%}"""

# The system message goes to the last question, wherever that is; no generation prompt.
MOVING_SYSTEM = """\
{{- bos_token -}}
{%- set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<|turn|>' -}}
{%- if messages[0].role == 'system' and message == last -%}
{{- messages[0].content + '\\n' -}}{%- endif -%}
{{- message.content + '<|header|>' -}}
{%- elif message.role == 'assistant' -%}{{- ' ' + message.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}"""

# Ends the whole chat with a token of its own, as Phi-3 does.
CLOSED = """\
{%- for message in messages -%}
{{- '<|turn|>' + message.role + '\\n' + message.content + '<|end|>\\n' -}}
{%- endfor -%}
{{- '<|turn|>assistant\\n' if add_generation_prompt else '<|header|>' -}}"""

# Writes the results of tools into the message that asked for them, before its text, as Gemma 4.
RESULTS_INSIDE = """\
{%- for message in messages -%}
{%- if message.role != 'tool' -%}
{{- '<|turn|>' + message.role + '\\n' -}}
{%- for call in message.tool_calls or [] -%}
{{- '[call ' + call.function.name + ']' -}}{%- endfor -%}
{%- if loop.nextitem is defined and loop.nextitem.role == 'tool' -%}
{{- '[result ' + loop.nextitem.content + ']' -}}{%- endif -%}
{{- message.content + '<|end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif -%}"""

# Takes the arguments of a call for text, as DeepSeek-V3 does.
TEXT_ARGUMENTS = """\
{%- for message in messages -%}
{{- '<|turn|>' + message.role + '\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}{{- '[call ' + call.function.arguments + ']' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif -%}"""

# Says itself what the model generates: here without the end token.
MARKED = """\
{%- for message in messages -%}
{{- '<|turn|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content -}}{%- endgeneration -%}{{- '<|end|>' -}}
{%- else -%}{{- message.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}"""

# Repeats every answer at the end of the text.
ECHO = """\
{%- for message in messages -%}
{{- message.role + ': ' + message.content + '<|end|>' -}}{%- endfor -%}
{%- for message in messages -%}{{- message.content + ' again ' -}}{%- endfor -%}"""


@pytest.fixture(scope="session")
def templates() -> SimpleNamespace:
    return SimpleNamespace(
        turns=TURNS,
        headers=HEADERS,
        merged_system=MERGED_SYSTEM,
        thinking=THINKING,
        moving_system=MOVING_SYSTEM,
        closed=CLOSED,
        results_inside=RESULTS_INSIDE,
        text_arguments=TEXT_ARGUMENTS,
        marked=MARKED,
        echo=ECHO,
    )


def byte_level(*, begin: bool) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(SENTENCES, trainer)
    if begin:
        core.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", core.token_to_id("<|begin|>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL[2:],
    )


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level; has a begin token but does not put it before texts."""
    return byte_level(begin=False)


@pytest.fixture(scope="session")
def beginning_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level; puts its begin token before texts."""
    return byte_level(begin=True)


@pytest.fixture
def encode() -> Callable[..., Encoded]:
    """Tokenises one example."""

    def encode_one(
        example: object,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        train_on: str = "completion",
    ) -> Encoded:
        from tlora.data.rows import Origin

        renderer = Renderer(tokenizer, template=template, train_on=train_on)  # type: ignore[arg-type]
        (row,) = Encoder(tokenizer, renderer).encode([(example, Origin("rows.jsonl", 7))])  # type: ignore[list-item]
        return row

    return encode_one


@pytest.fixture
def assert_trained() -> Callable[..., None]:
    """Checks that the runs of trained tokens, decoded, are exactly the expected texts."""

    def check(
        input_ids: np.ndarray,
        labels: np.ndarray,
        expected: list[str],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        trained = labels != IGNORED
        assert (labels[trained] == input_ids[trained]).all()
        edges = np.flatnonzero(np.diff(np.concatenate(([False], trained, [False])).astype(int)))
        runs = [
            tokenizer.decode(input_ids[start:end].tolist())
            for start, end in zip(edges[::2], edges[1::2], strict=True)
        ]
        assert runs == expected

    return check


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as JSON lines and gives the path."""

    def write(rows: list[object], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
