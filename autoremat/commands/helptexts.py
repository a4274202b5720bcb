"""What `autoremat COMMAND --help` says. Text only."""

from __future__ import annotations

# One line per paragraph: typer keeps the line breaks inside them.
SOLVE = "\n\n".join(
    [
        "Plan which operations of a graph to run again, so that its peak fits a budget.",
        "[bold]PROBLEM[/] is a JSON file: a networkx node-link graph with [bold]time[/] and "
        "[bold]nbytes[/] per node (and perhaps [bold]phase[/], forward or backward), or a problem "
        "in autoremat's own schema. An edge leads from a producer to its reader.",
        "The baseline is the graph without recompute: every operation once, in the file's order.",
        "[bold]Examples[/]",
        "  autoremat solve graph.json --budget 60%",
        "  autoremat solve graph.json --budget 12GiB --out plan.json",
        "  autoremat solve graph.json --budget 123456 --json",
        "  autoremat solve graph.json --pareto --time-limit 120",
        "[bold]Exit codes[/]",
        "  0  a plan within the budget",
        "  1  input that cannot be used",
        "  2  no plan found fits the budget",
        "  130  interrupted with Ctrl-C",
    ]
)

_TARGET = (
    "[bold]TARGET[/] is [bold]path/to/file.py:function[/] or [bold]package.module:function[/]. "
    "The function takes no arguments and returns (model, inputs) or (model, inputs, loss_fn): "
    "inputs is a tensor, a tuple of tensors (positional) or a dict of them (keywords); without "
    "loss_fn(output) the model returns its loss, or an output with .loss. It runs as a script of "
    "yours does. Or it is [bold]hf:CONFIG.json[/], any configuration of Hugging Face transformers, "
    "with --batch and --seq; nothing is downloaded."
)

PLAN = "\n\n".join(
    [
        "What a budget costs: the plan of a training step that is not run. No weights of an hf: "
        "target are made, and the device need not be here.",
        _TARGET,
        "[bold]Examples[/]",
        "  autoremat plan examples/train_gpt.py:make --budget 150MiB --html plan.html",
        "  autoremat plan hf:config.json --batch 4 --seq 2048 --device H100 --budget 80%",
        "  autoremat plan model.py:make --budget 12GiB --optimizer AdamW --out report.json",
        "  autoremat plan hf:config.json --batch 8 --device A100 --budget 30GB --offload 64GB",
        "  autoremat plan model.py:make --budget 12GiB --goal throughput",
        "  autoremat plan model.py:make --budget 12GiB --json",
        "[bold]Exit codes[/]",
        "  0  a plan within the budget",
        "  1  input that cannot be used, or an output that cannot be written",
        "  2  no plan found fits the budget",
        "  130  interrupted with Ctrl-C",
    ]
)

FIT = "\n\n".join(
    [
        "The largest batch that fits a budget, and the fastest, which is often a smaller one: "
        "sizes are planned, none is run, so nothing runs out of memory.",
        _TARGET,
        "A function that has a parameter of the size's name, such as make(batch=8), is called with "
        "each size; without one, the first dimension of its inputs is the batch.",
        "[bold]Examples[/]",
        "  autoremat fit examples/train_gpt.py:make --budget 150MiB --svg batches.svg",
        "  autoremat fit hf:config.json --seq 2048 --device H100 --budget 80% --optimizer AdamW",
        "  autoremat fit hf:config.json --over sequence --batch 1 --device H100 --budget 40GiB",
        "  autoremat fit hf:c.json --over batch,sequence --seq 4096 --device H100 --budget 80%",
        "  autoremat fit model.py:make --budget 12GiB --global-batch 256 --json",
        "[bold]Exit codes[/]",
        "  0  a size that fits",
        "  1  input that cannot be used, or an output that cannot be written",
        "  2  not even the smallest size fits",
        "  130  interrupted with Ctrl-C",
    ]
)

PARETO = "\n\n".join(
    [
        "Peak against time: the plans of a training step over all budgets, from the smallest peak "
        "to the fastest step. The step is not run.",
        _TARGET,
        "[bold]Examples[/]",
        "  autoremat pareto examples/train_gpt.py:make",
        "  autoremat pareto hf:config.json --batch 4 --seq 2048 --device A100-80GB",
        "  autoremat pareto model.py:make --points 20 --time-limit 120 --json",
        "[bold]Exit codes[/]",
        "  0  a curve",
        "  1  input that cannot be used",
        "  130  interrupted with Ctrl-C",
    ]
)

PROFILE = "\n\n".join(
    [
        "Where the time and the memory of a training step go without recompute: each operation "
        "measured by itself, added up by operator and by module.",
        _TARGET,
        "[bold]Examples[/]",
        "  autoremat profile examples/train_gpt.py:make",
        "  autoremat profile hf:config.json --batch 4 --seq 2048 --device H100",
        "  autoremat profile model.py:make --json",
        "[bold]Exit codes[/]",
        "  0  measured",
        "  1  input that cannot be used",
        "  130  interrupted with Ctrl-C",
    ]
)

COMPARE = "\n\n".join(
    [
        "Measure a training step under autoremat's budgets and under what else there is: peak, "
        "step time, samples per second, and the first step, which plans and compiles.",
        _TARGET,
        "Each variant is made anew in a process of its own, one after the other; then one step of "
        "each is timed in turn. A variant that fails is a row that says why. The step is forward "
        "and backward, without an optimizer.",
        "[bold]Variants[/]: every-layer, every-2 (or another number: one checkpoint for so many "
        "layers), sqrt, selective-attention (checkpoints that save matrix products and attention), "
        "compile (torch.compile), torch:0.5 (its activation_memory_budget). Without --variants all "
        "of these and torch:0.1; with --compiler eager those that need no Inductor. Eager mode is "
        "always measured.",
        "[bold]Examples[/]",
        "  autoremat compare examples/train_gpt.py:make",
        "  autoremat compare examples/train_gpt.py:make --plot gpt.svg --json",
        "  autoremat compare model.py:make --budgets 50%,12GiB,smallest --variants sqrt,compile",
        "  autoremat compare model.py:make --compiler eager --rounds 3",
        "[bold]Exit codes[/]",
        "  0  measured, whatever the rows say",
        "  1  input that cannot be used",
        "  130  interrupted with Ctrl-C; what was measured is printed",
    ]
)

DOCTOR = "\n\n".join(
    [
        "What autoremat rests on here: versions, device, compiler, solver, cache, and each "
        "private name of torch.",
        "With --gpu, what plans predict on the GPU at hand: a 12-layer GPT in bfloat16 autocast, "
        "as large as its free memory has room for, is trained for some steps under five budgets; "
        "peaks, what CUDA's allocator reserves, and step times stand beside what was said before. "
        "The GPU should be idle. What it reaches is kept for later plans here; the file of --out "
        "is one to attach to an issue, and to plan for this GPU elsewhere with --device FILE.",
        "[bold]Examples[/]",
        "  autoremat doctor",
        "  autoremat doctor --gpu --out card.json",
        "  autoremat plan TARGET --budget 12GiB --device card.json",
        "[bold]Exit codes[/]",
        "  0  all of it works",
        "  1  something is missing, or cannot be used; the line says what to do",
        "  3  with --gpu: a budget failed, or its measured peak was above it",
        "  130  interrupted with Ctrl-C",
    ]
)

VERIFY = "\n\n".join(
    [
        "Check on one training step that the gradients are those of eager mode and that the "
        "measured peak is within a budget.",
        _TARGET,
        "The step runs once in eager mode as well, so it has to fit without a plan.",
        "[bold]Examples[/]",
        "  autoremat verify examples/train_gpt.py:make --budget 150MiB",
        "  autoremat verify my_package.models:small --budget 80%",
        "  autoremat verify model.py:make --budget 12GiB --compiler eager --json",
        "[bold]Exit codes[/]",
        "  0  the same results, within the budget",
        "  1  input that cannot be used",
        "  2  no plan found fits the budget",
        "  3  a difference, or a measured peak above the budget",
        "  130  interrupted with Ctrl-C",
    ]
)

SHOW = "\n\n".join(
    [
        "Print a stored report, or write it as a page, a table, a snapshot or a trace.",
        "[bold]REPORT[/] is the JSON that [bold]autoremat.report(model).to_json()[/] gives. "
        "PyTorch is not needed.",
        "An output file that is there is replaced if this command wrote it; another one is kept, "
        "unless --force is given.",
        "[bold]Examples[/]",
        "  autoremat show report.json",
        "  autoremat show report.json --html report.html",
        "  autoremat show report.json --snapshot plan.pickle    (https://pytorch.org/memory_viz)",
        "  autoremat show report.json --trace plan.json    (https://ui.perfetto.dev)",
        "  autoremat show report.json --csv values.csv --json",
        "[bold]Exit codes[/]",
        "  0  shown",
        "  1  input that cannot be used, or an output that cannot be written",
        "  130  interrupted with Ctrl-C",
    ]
)

CACHE = "\n\n".join(
    [
        "Show what is kept on this machine, so that a later process neither measures nor plans the "
        "same again.",
        "Everything is kept by content: the graph, sizes, the budget, what is resident, the "
        "device, settings, and the versions of torch and autoremat. What no longer fits is not "
        "found. XDG_CACHE_HOME says where.",
        "An import adds what is not there yet: one machine plans, others of the same kind load. "
        "What torch compiles it keeps itself: see torch.compiler.save_cache_artifacts.",
        "[bold]Examples[/]",
        "  autoremat cache",
        "  autoremat cache --clear",
        "  autoremat cache --export shared/plans",
        "  autoremat cache --import shared/plans --json",
        "[bold]Exit codes[/]",
        "  0  done",
        "  1  input that cannot be used, or a place that cannot be written",
        "  130  interrupted with Ctrl-C",
    ]
)
