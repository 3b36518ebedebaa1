"""Telling why states that are stored are not used for a prompt."""

from ..prefix_folder import NodeFileError, NodeNotFoundError, PrefixFolder
from .keys import num_common, token_ids_of
from .node_description import NodeDescription
from .prompt import Prompt


def obstacles(folder: PrefixFolder, prompt: Prompt, num_tokens: int) -> list[str]:
    """
    Return lines on stored states of more than `num_tokens` of a prompt's first tokens, which are not used.

    Raises:
        PrefixFolderError: the folder cannot be read.
    """
    lines: dict[str, int] = {}
    wanted = prompt.token_ids[0].numpy()
    for entry in folder.entries():
        try:
            stored, description = (
                token_ids_of(folder.token_ids(entry.id)),
                NodeDescription.from_bytes(entry.description),
            )
        except (NodeNotFoundError, NodeFileError, ValueError):
            continue
        common = num_common(stored, wanted)
        if common > num_tokens:
            different = prompt.identity.differences(description.identity)
            reason = "; ".join(different) or (
                "no pass ended there, or they are answers of a conversation"
                if prompt.passes.needs_whole_nodes
                else "they are answers of a conversation, or leave the next pass too short"
            )
            lines[reason] = max(common, lines.get(reason, 0))
    return [f"{common:,} tokens are stored and not used: {reason}" for reason, common in lines.items()]
