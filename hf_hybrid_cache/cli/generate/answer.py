"""`hf-hybrid-cache generate`: a question about a long document, with any of the caches."""

from dataclasses import replace

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ...prefix_store import PrefixStore
from ..choices import DEFAULT_QUESTION
from ..console import note
from ..distributed.group import joined
from ..loading import LoadedModel, compile_kernels, load_model
from ..runs.prompt_store import PromptStore, title_of
from ..runs.prompts import DEFAULT_DOCUMENT, Prompt, context_length, where_it_says_so
from ..runs.timed_run import CACHES, Run
from ..terminal import TokenStream, write
from .answer_record import print_json, record
from .comparison import WITH_WEIGHTS, conclusion, dtype_text, one_line, summary, table
from .generate_options import GenerateOptions
from .prompt import PromptSource, make_prompt, read_source
from .task import GenerateTask


def answer(options: GenerateOptions, out: Console, notes: Console) -> None:
    """
    Print the answer that one cache gives, or with `--compare` those of all caches.

    Args:
        options: of the command.
        out: receives answers.
        notes: receives remarks.

    Raises:
        UsageError: an option does not fit the machine or the model.
        PromptError: the prompt does not fit the model.
        ModelLoadError: the model cannot be loaded.
        CacheFileError: a cache cannot be saved or loaded.
        PrefixStoreError: the prompt cannot be kept.
        PrefixFolderError: the folder of `--keep` cannot be used.
    """
    replaced = options.files.checked_place()
    prompts = None if options.files.keep is None else PrefixStore(options.files.keep)
    source = read_source(options, notes)
    if replaced is not None:
        note(notes, f"{options.files.save} will take the place of {replaced}")
    ready = load_model(options.model, notes)
    model, context = ready.model, context_length(ready.model)
    note(notes, f"model: {dtype_text(model)} on {model.device}, context of {context:,} tokens")
    text_out = Console(quiet=True) if options.as_json else out
    prompt = make_prompt(options, source, ready, text_out, notes)
    task = _task(options, ready, prompt, notes)
    if prompts is not None and ready.tokenizer is not None:
        task = replace(task, store=PromptStore(prompts, ready.tokenizer, notes), title=_title(options, source))
    stream = TokenStream(text_out, ready.tokenizer)
    if options.cache.compare:
        asks_default = source.is_default and options.prompt.question is None
        runs = _run_all(task, ready, stream, text_out if asks_default else None)
        _print_comparison(options, task, ready, runs, out)
    else:
        _answer_with_one(options, task, ready, stream, out)


def _task(options: GenerateOptions, ready: LoadedModel, prompt: Prompt, notes: Console) -> GenerateTask:
    """The task of the options, once all processes are here and kernels are compiled."""
    group = joined()
    if group is not None:
        note(notes, f"{group.size()} processes keep a share of the cache each")
    compares, name = options.cache.compare, options.cache.name
    if name != "stock" or compares:
        compile_kernels(ready.model, name == "quantized" or compares, notes)
    return GenerateTask(ready.model, prompt, options.cache.options(group), options.answer, notes)


def _title(options: GenerateOptions, source: PromptSource) -> str:
    """The title of the prompt in lists."""
    if options.prompt.prompt_file is not None:
        return title_of(options.prompt.prompt_file.name)
    document = DEFAULT_DOCUMENT if source.documents is None else source.documents.title
    return title_of(document, None if options.only_keeps else options.prompt.question or DEFAULT_QUESTION)


def _answer_with_one(
    options: GenerateOptions, task: GenerateTask, ready: LoadedModel, stream: TokenStream, out: Console
) -> None:
    """Print the answer of one cache, or only keep the document where nothing is asked."""
    name, cache = options.cache.name, None
    if options.files.load:
        cache, name = task.load(options.files.load), f"{options.files.load}"
    elif options.files.save:
        cache = task.save(name, options.files.save)
    elif options.only_keeps:
        task.keep(name)
    if options.only_keeps:
        return
    run = task.run(name, stream.put, cache)
    stream.end()
    reason = task.finish_reason(run)
    if options.as_json:
        print_json(out, {"cache": name} | record(run, task.prompt, ready.tokenizer, reason))
    elif reason == "length":
        note(task.notes, f"ended at --max-new-tokens {options.answer.max_new_tokens:,}, which may be raised")
    note(task.notes, summary(name, run, ready.weights_text))


def _run_all(task: GenerateTask, ready: LoadedModel, stream: TokenStream, quote_out: Console | None) -> dict[str, Run]:
    """
    Generate with every cache, and at last with quantized weights where the model is on the CPU and has none.

    Args:
        task: what is generated.
        ready: the model.
        stream: receives the answer of the stock cache.
        quote_out: receives the sentence of the default document that answers the default question.
    """
    runs = {}
    for name in CACHES:
        task.warm_up(name)
        runs[name] = task.run(name)
        if name == "stock":
            for token in runs[name].tokens:  # only now: writing while it runs would be timed
                stream.put(token)
            stream.end()
            if quote_out is not None and ready.tokenizer is not None:
                _quote_document(task.prompt, ready.tokenizer, quote_out)
    if ready.weights_text is None and task.model.device.type == "cpu":
        few_bits = task.run_with_few_bits("quantized")
        runs |= {} if few_bits is None else {WITH_WEIGHTS: few_bits}
    return runs


def _quote_document(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, out: Console) -> None:
    """Print the sentence of the default document that answers the default question, if the prompt has it."""
    sentence = where_it_says_so(str(tokenizer.decode(prompt.input_ids[0])))
    write(out, f"\nThe document says: {sentence}\n" if sentence else "")


def _print_comparison(
    options: GenerateOptions, task: GenerateTask, ready: LoadedModel, runs: dict[str, Run], out: Console
) -> None:
    """Print a table of the runs, and the answers that differ from the stock cache's; or all as JSON."""
    if options.as_json:
        for name, run in runs.items():
            answered = record(run, task.prompt, ready.tokenizer, task.finish_reason(run))
            print_json(out, {"cache": one_line(name)} | answered)
        return
    out.print(table(runs))
    write(out, conclusion(runs, task.prompt.num_tokens, dtype_text(task.model)))
    for name, run in runs.items():
        if ready.tokenizer is not None and run.first_difference(runs["stock"]) is not None:
            text = ready.tokenizer.decode(run.tokens, skip_special_tokens=True)
            write(out, f"\n{one_line(name)} answers: {text}\n")
