"""Guesses: what layers with well-known names may be, for modules that say nothing themselves.

A guess needs the whole group: the layers into and out of an MLP, or the four projections of an
attention whose module tells its number of heads. A fused projection is never guessed: its rows may
lie in several orders, and a wrong one computes something else without an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import nn

from shardwise.sharding.axes_sources import Findings, integer_at

_INTO = (
    "up_proj",
    "gate_proj",
    "fc1",
    "up",
    "gate",
    "w1",
    "w3",
    "c_fc",
    "dense_h_to_4h",
    "linear1",
)
_OUT_OF = ("down_proj", "fc2", "down", "w2", "c_proj", "dense_4h_to_h", "linear2")
_QUERY = ("q_proj", "query", "wq", "to_q", "q")
_KEY = ("k_proj", "key", "wk", "to_k", "k")
_VALUE = ("v_proj", "value", "wv", "to_v", "v")
_OUTPUT = ("o_proj", "out_proj", "wo", "to_out", "o", "out")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_GROUPS = ("num_key_value_groups", "n_rep")
# These hand their weights to one function of torch, past the modules that hold them.
_OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_TOKENS = ("embed", "embedding", "embed_tokens", "tok_embeddings", "token_embedding", "wte")
_POSITIONS = ("wpe", "position_embeddings", "pos_embed", "position_embedding", "pos_embedding")
_HEAD = ("lm_head", "head", "output", "unembed", "embed_out")


def guess_axes(model: nn.Module, known: Collection[str]) -> Findings:
    """Guessed axes, sizes and integers.

    Args:
        model: any module.
        known: paths of parameters that have names already; they and their groups are left alone.

    >>> class Attention(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.num_heads = 2
    ...         self.wq, self.wk = nn.Linear(8, 8), nn.Linear(8, 8)
    ...         self.wv, self.wo = nn.Linear(8, 8), nn.Linear(8, 8)
    >>> guess_axes(Attention(), ()).axes["wo.weight"]
    'embed (heads hd)'
    """
    found = Findings()
    tables = (part for part in model.modules() if isinstance(part, nn.Embedding))
    vocabularies = [part.num_embeddings for part in tables]
    opaque = [path for path, part in model.named_modules() if isinstance(part, _OPAQUE)]
    for path, module in model.named_modules():
        if any(path == above or path.startswith(f"{above}.") for above in opaque):
            continue
        children = dict(module.named_children())
        layers = {name: part for name, part in children.items() if type(part) is nn.Linear}
        group = _attention(module, layers, found.sizes) or _mlp(layers)
        for name, part in children.items():
            text = _single(name, part, vocabularies)
            if text is not None:
                group.axes.setdefault(name, text)
        for name, text in group.axes.items():
            _take(found, f"{path}.{name}".lstrip("."), children[name], text, known)
        found.sizes |= group.sizes
        prefix = f"{path}." if path else ""
        found.ints |= {prefix + name: text for name, text in group.ints.items()}
    return found


def _take(found: Findings, path: str, layer: nn.Module, text: str, known: Collection[str]) -> None:
    """Name the weight and the bias of a layer."""
    for kind, _ in layer.named_parameters(recurse=False):
        if f"{path}.{kind}" not in known:
            found.name(f"{path}.{kind}", _rows(text) if kind == "bias" else text, "guess")


def _rows(text: str) -> str:
    """The first dimension of a pattern of one or two."""
    return text[: text.index(")") + 1] if text.startswith("(") else text.partition(" ")[0]


def _only(names: Iterable[str], layers: Mapping[str, nn.Linear]) -> list[str]:
    return [name for name in names if name in layers]


def _mlp(layers: Mapping[str, nn.Linear]) -> Findings:
    into, out_of = _only(_INTO, layers), _only(_OUT_OF, layers)
    group = Findings()
    if len(out_of) == 1 and into:
        back = layers[out_of[0]]
        if all(layers[name].out_features == back.in_features for name in into):
            group.axes = dict.fromkeys(into, "mlp embed") | {out_of[0]: "embed mlp"}
    return group


def _attention(
    module: nn.Module, layers: Mapping[str, nn.Linear], sizes: Mapping[str, int]
) -> Findings | None:
    """Four projections of a module that tells how many heads they make; None if it is none."""
    names = [_only(known, layers) for known in (_QUERY, _KEY, _VALUE, _OUTPUT)]
    heads = _integer(module, _HEADS)
    if any(len(found) != 1 for found in names) or heads is None:
        return None
    query, key, value, output = (layers[found[0]] for found in names)
    told = _integer(module, _KV_HEADS)
    kv = told or heads
    hd = query.out_features // heads
    wide = {query.out_features, output.in_features} == {heads * hd}
    narrow = {key.out_features, value.out_features} == {kv * hd}
    counted = {"heads": heads, "hd": hd} | ({"kv": kv} if told else {})
    if not (wide and narrow) or any(sizes.get(name, n) != n for name, n in counted.items()):
        return None
    shared = "(kv hd) embed" if told else "(heads hd) embed"
    rows = ("(heads hd) embed", shared, shared, "embed (heads hd)")
    ints = dict.fromkeys(_present(module, _HEADS), "heads")
    ints |= dict.fromkeys(_present(module, _KV_HEADS), "kv")
    if told and heads % kv == 0:
        groups = [n for n in _GROUPS if integer_at(module, [n]) == heads // kv]
        ints |= dict.fromkeys(groups, "heads // kv")
    axes = {found[0]: text for found, text in zip(names, rows, strict=True)}
    return Findings(axes=axes, sizes=counted, ints=ints)


def _present(module: nn.Module, names: Sequence[str]) -> list[str]:
    return [name for name in names if integer_at(module, [name]) is not None]


def _integer(module: nn.Module, names: Sequence[str]) -> int | None:
    """What all attributes of those names agree on."""
    values = {integer_at(module, [name]) for name in _present(module, names)}
    value = values.pop() if len(values) == 1 else None
    return value if value else None


def _single(name: str, part: nn.Module, vocabularies: Sequence[int]) -> str | None:
    """Embeddings, heads and norms by their own names."""
    if isinstance(part, nn.Embedding):
        return "pos embed" if name in _POSITIONS else "vocab embed" if name in _TOKENS else None
    if type(part) is nn.Linear and name in _HEAD and part.out_features in vocabularies:
        return "vocab embed"
    flat = [param.ndim for param in part.parameters(recurse=False)]
    is_norm = "norm" in type(part).__name__.lower() and set(flat) == {1}
    return "norm" if is_norm else None
