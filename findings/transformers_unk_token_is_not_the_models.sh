#!/usr/bin/env bash
# The unk_token of a fast tokenizer of transformers does not reach its model: unknown text vanishes without a token.
#
# Guess:     a tokenizer with `unk_token="<unk>"` gives that token for a character that it does not know, since
#            `tokenizer.unk_token_id` is set and its documentation says so.
# Behaviour: the model in the Rust library has an `unk_token` of its own, and None there means that unknown characters
#            are dropped. A byte-level BPE that was trained without the whole alphabet (`initial_alphabet`) therefore
#            encodes "½" as nothing at all, and a text loses it without an error. GPT2Tokenizer, whose default
#            unk_token is <|endoftext|>, builds such a model too. `BPE(unk_token="<unk>")` is the cure.
# Seen with: transformers 5.23.0, tokenizers 0.23.3, Python 3.11:
#            unk_token of the wrapper: ids of "½": []
#            unk_token of the model:   ids of "½": [0, 0]
#            GPT2Tokenizer:            ids of "½": []
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3
cat > unknown.py <<'PYTHON'
import sys

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast


def trained(**options):
    """Return a byte-level tokenizer of a small text."""
    tokenizer = Tokenizer(BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=60, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(["a plain text of a few letters"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


of_wrapper = trained().encode("½", add_special_tokens=False)
of_model = trained(unk_token="<unk>").encode("½", add_special_tokens=False)
gpt2 = GPT2Tokenizer(vocab={"<|endoftext|>": 0, "a": 1}, merges=[])
of_gpt2 = gpt2.encode("½", add_special_tokens=False)
print(f'unk_token of the wrapper: ids of "½": {of_wrapper}')
print(f'unk_token of the model:   ids of "½": {of_model}')
print(f'GPT2Tokenizer:            ids of "½": {of_gpt2}')
sys.exit(not (of_wrapper == of_gpt2 == [] and of_model == [0, 0] and gpt2.unk_token_id == 0))
PYTHON
env/bin/python unknown.py 2> /dev/null
