"""Telling why states that are stored are not used for a prompt."""

from ..prefix_folder import NodeFileError, NodeNotFoundError, PrefixFolder
from .nodes.description import NodeDescription
from .nodes.keys import num_common, token_ids_of
from .prompts.prompt import Prompt


def obstacles(folder: PrefixFolder, prompt: Prompt, num_tokens: int) -> list[str]:
    """
    Return lines on stored states of more than `num_tokens` of a prompt's first tokens, which are not used.

    Raises:
        PrefixStoreFolderError: the folder cannot be read.
    """
    lines: dict[str, int] = {}
    of_the_same = (
        "no pass ended there, or they are answers of a conversation"
        if prompt.passes.needs_whole_nodes
        else "they are answers of a conversation, or leave the next pass too short"
    )
    wanted = prompt.token_ids[0].numpy()
    for entry in folder.entries():
        try:
            identity = NodeDescription.from_bytes(entry.description).identity
            reason = "; ".join(prompt.identity.differences(identity)) or of_the_same
            most = lines.get(reason, num_tokens)
            if entry.start + entry.num_tokens <= most:
                continue
            common = num_common(token_ids_of(folder.token_ids(entry.id)), wanted)
        except (NodeNotFoundError, NodeFileError, ValueError):
            continue
        if common > most:
            lines[reason] = common
    return [f"{common:,} tokens are stored and not used: {reason}" for reason, common in lines.items()]
