"""
Clients of `hf-hybrid-cache serve` at the same time: seconds a token of each, and of a question beside a long prompt.

One, two, four and eight clients ask about one document, each something else, in turns. Then a client asks something
short, alone, and while the server reads a long prompt of another one. Weights have 4 bits, keys and values 8, and
nothing is drafted, so that tokens come one by one.
"""

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from experiments.common.harness import Cell, publish
from experiments.common.options import plain_parser
from experiments.common.texts import english_ids
from experiments.peers.serving import LARGE, MODEL, ask, our_server, save_large_model, serving, user
from hf_hybrid_cache.models import load

URL = "http://127.0.0.1:8181/v1"
COUNTS = (1, 2, 4, 8)
BEGINNINGS = ("Tell a story about", "Write a poem about", "Explain in many words", "Make a long list of")
THINGS = ("a dragon.", "a baker.")
NEW_TOKENS = 96


def seconds_a_token(messages: list[dict[str, str]]) -> float:
    """Ask, and return the seconds from one token to the next."""
    answer = ask(URL, messages, NEW_TOKENS, drafts=0, stream_options={"include_usage": True})
    times = answer["times"]
    return (times[-1] - times[0]) / (answer["tokens"] - 1)


def main() -> None:
    parser = plain_parser("server_clients", __doc__)
    parser.add_argument("--large", action="store_true", help="a model of 1.1 billion weights, which are random")
    parser.add_argument("--tokens", type=int, default=2000, help="of the document (default: %(default)s)")
    parser.add_argument("--long", type=int, default=7000, help="tokens of the long prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    arguments = parser.parse_args()
    tokenizer: Any = load(MODEL)[1]
    (ids,) = english_ids(tokenizer, arguments.tokens + arguments.long * arguments.rounds)
    parts = ids.split([arguments.tokens] + [arguments.long] * arguments.rounds)
    document, *long_prompts = (str(tokenizer.decode(part)).strip() for part in parts)
    questions = [f"{document}\n\n{beginning} {thing}" for thing in THINGS for beginning in BEGINNINGS]

    def cells() -> Iterator[tuple[str, Cell]]:
        samples: dict[int, list[float]] = {count: [] for count in COUNTS}
        for _ in range(arguments.rounds):
            for count in COUNTS:
                asked = ([user(each)] for each in questions[:count])
                samples[count].append(median(pool.map(seconds_a_token, asked)))
        seconds = {f"{count} clients": median(each) for count, each in samples.items()}
        yield (
            "one document",
            {
                "document_tokens": arguments.tokens,
                "median_seconds_a_token": seconds,
                "over_one_client": {name: each / seconds["1 clients"] for name, each in seconds.items()},
                "samples_seconds_a_token": {f"{count} clients": each for count, each in samples.items()},
            },
        )
        firsts: dict[str, list[float]] = {"alone": [], "beside a long prompt": []}
        for text in long_prompts:
            firsts["alone"].append(ask(URL, [user("Who are you?")], 1)["times"][0])
            reading = pool.submit(ask, URL, [user(text)], 1)
            time.sleep(1)
            firsts["beside a long prompt"].append(ask(URL, [user("Who are you?")], 1)["times"][0])
            assert not reading.done(), "The long prompt was read before the question came: let it have more tokens."
            reading.result()
        yield (
            "a short question",
            {
                "long_tokens": arguments.long,
                "median_seconds": {name: median(each) for name, each in firsts.items()},
                "samples_seconds": firsts,
            },
        )

    with ExitStack() as stack:
        folder, model_folder = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2))
        pool = stack.enter_context(ThreadPoolExecutor(max(COUNTS)))
        server = [*our_server(folder, weights=4), "--parallel", str(max(COUNTS))]
        if arguments.large:
            save_large_model(tokenizer, Path(model_folder))
            server += ["--model", model_folder]
        with serving(server, URL, {}):
            ask(URL, [user(questions[0])], 2)
            publish(
                "server_clients",
                cells(),
                arguments.out,
                lambda cell: cell.get("over_one_client") or cell["median_seconds"],
                model=LARGE if arguments.large else MODEL,
                weights_bits=4,
                kv_bits=8,
            )


if __name__ == "__main__":
    main()
