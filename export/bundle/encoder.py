"""Query text to vectors: the bundle's tokenizer and its ONNX encoder."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

from bidmatch.base.errors import BidmatchError, ConfigError, DamagedError
from bidmatch.base.text import key
from export.bundle.format import (
    ATTENTION_MASK,
    EMBEDDING,
    ENCODER_FP32,
    ENCODER_INT8,
    INPUT_IDS,
    TOKENIZER,
    WIDE_EMBEDDING,
    Precision,
)
from export.bundle.read import Bundle

CPU = ("CPUExecutionProvider",)
CUDA = ("CUDAExecutionProvider", "CPUExecutionProvider")


class QueryVectors(NamedTuple):
    """The vectors [Φ_D(x) ⊕ N(Φ_C(x))] of n texts.

    Attributes:
        narrow: float32 (n, dim): what is searched with.
        wide: float32 (n, wide_dim): what re-scores; of width 0 where the encoder has no wide heads.
    """

    narrow: np.ndarray
    wide: np.ndarray

    def of(self, texts: np.ndarray) -> QueryVectors:
        """Those of some of the texts: indices, int64 (m,)."""
        return QueryVectors(self.narrow[texts], self.wide[texts])


def make_session(
    model: bytes, *, threads: int, providers: Sequence[str] = CPU
) -> onnxruntime.InferenceSession:
    """An ONNX Runtime session for short texts beside other threads: bounded threads that never spin.

    Make it after forking, not before.

    Raises:
        ConfigError: ONNX Runtime would run on other providers than those asked for (it falls back silently).
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.enable_mem_pattern = False  # patterns are kept per shape, and every batch has its own
    options.log_severity_level = 3
    absent = [name for name in providers if name not in onnxruntime.get_available_providers()]
    if absent:
        raise ConfigError(
            f"ONNX Runtime has no {absent[0]} here; it has {', '.join(onnxruntime.get_available_providers())}"
        )
    # On CPUs adding and normalising in one operator takes longer than one after the other.
    slower = ["SkipLayerNormFusion"] if tuple(providers) == CPU else None
    session = onnxruntime.InferenceSession(
        model, options, providers=list(providers), disabled_optimizers=slower
    )
    got = session.get_providers()
    if got[: len(providers)] != list(providers):
        raise ConfigError(
            f"ONNX Runtime was asked for {', '.join(providers)} and runs on {', '.join(got)}",
            hint="Is the device there, with its driver and CUDA libraries? The CPU provider always works.",
        )
    return session


def io_problem(session: onnxruntime.InferenceSession, dim: int, wide_dim: int = 0) -> str | None:
    """What is wrong with an encoder's inputs and outputs, or None; a `wide_dim` of 0 means one output."""
    inputs = {node.name: (node.type, len(node.shape)) for node in session.get_inputs()}
    if inputs != {INPUT_IDS: ("tensor(int64)", 2), ATTENTION_MASK: ("tensor(int64)", 2)}:
        return f"its inputs are {inputs}"
    if any(isinstance(size, int) for node in session.get_inputs() for size in node.shape):
        return "its input sizes are fixed"
    outputs = [(node.name, node.type, list(node.shape)[1:]) for node in session.get_outputs()]
    wanted = [(EMBEDDING, dim), (WIDE_EMBEDDING, wide_dim)][: 2 if wide_dim else 1]
    if outputs != [(name, "tensor(float)", [width]) for name, width in wanted]:
        shown = " and ".join(f"{name} of width {width}" for name, width in wanted)
        return f"its output is {outputs}, not {shown}"
    return None


def pad(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and mask, int64 (n, t), of sequences of ids, t the longest's length and at least 1."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    width = max(1, int(lengths.max(initial=0)))
    mask = np.arange(width) < lengths[:, None]
    ids = np.zeros((len(rows), width), dtype=np.int64)
    ids[mask] = np.fromiter(
        (token for row in rows for token in row), dtype=np.int64, count=int(lengths.sum())
    )
    return ids, mask.astype(np.int64)


class TextEncoder:
    """Turns query texts into vectors. Safe to call from several threads at once.

    Args:
        session: an ONNX encoder (see `make_session`).
        tokenizer: a `tokenizers.Tokenizer` that does not pad.
        dim: width of the narrow vectors.
        wide_dim: width of the wide vectors; 0 where the encoder gives none.
    """

    def __init__(
        self, session: onnxruntime.InferenceSession, tokenizer: Tokenizer, dim: int, wide_dim: int = 0
    ):
        self.dim = dim
        self.wide_dim = wide_dim
        self._outputs = [EMBEDDING, WIDE_EMBEDDING] if wide_dim else [EMBEDDING]
        self._session = session
        self._tokenizer = tokenizer

    def tokenise(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and attention mask, int64 (n, t), of texts as people write them.

        t is the longest one's length, at least 1; an empty text may be all mask 0.
        """
        return pad(self.token_ids([key(text) for text in texts]))

    def token_ids(self, keys: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that are normalised and folded (see `bidmatch.base.text.key`) already."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(keys)]

    def tokens(self, key: str) -> list[str]:
        """The tokens of a text that is normalised and folded already."""
        return list(self._tokenizer.encode(key).tokens)

    def run(self, ids: np.ndarray, mask: np.ndarray) -> QueryVectors:
        """Vectors of what `tokenise` gave."""
        if not len(ids):
            return self._empty(0)
        narrow, *wide = self._session.run(self._outputs, {INPUT_IDS: ids, ATTENTION_MASK: mask})
        return QueryVectors(narrow, wide[0] if wide else narrow[:, :0])

    def encode(self, texts: Sequence[str], batch: int = 256) -> QueryVectors:
        """Vectors of any number of texts, `batch` at a time, like lengths together."""
        vectors = self._empty(len(texts))
        order = np.argsort(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)), kind="stable")
        for start in range(0, len(texts), batch):
            rows = order[start : start + batch]
            found = self.run(*self.tokenise([texts[row] for row in rows]))
            vectors.narrow[rows], vectors.wide[rows] = found.narrow, found.wide
        return vectors

    def _empty(self, count: int) -> QueryVectors:
        narrow, wide = (np.empty((count, width), dtype=np.float32) for width in (self.dim, self.wide_dim))
        return QueryVectors(narrow, wide)


class QueryEncoder(TextEncoder):
    """The encoder of a bundle.

    Args:
        bundle: a verified bundle.
        threads: threads of one `run`.
        providers: ONNX Runtime providers, best first.
        precision: None for what the export chose for CPUs; `fp32` is in every bundle.

    Attributes:
        dim: width of the narrow vectors.
        wide_dim: width of the wide vectors; 0 where the bundle does not re-score.
        precision: what is loaded.
        providers: what ONNX Runtime runs on.
        fallback: why it is the CPU although CUDA was wanted; None where that is not so.

    Raises:
        DamagedError: the tokenizer or the encoder cannot be loaded or does not fit the manifest.
        ConfigError: a provider, or the precision, is not to be had.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int = 1,
        *,
        providers: Sequence[str] = CPU,
        precision: Precision | None = None,
    ):
        self.precision: Precision = precision or bundle.manifest.encoder.precision
        name = ENCODER_INT8 if self.precision == "int8" else ENCODER_FP32
        if name not in bundle.manifest.files:
            raise ConfigError(f"{bundle.path} has no {self.precision} encoder", hint="Its export kept fp32.")
        try:
            session = make_session(bundle.read_bytes(name), threads=threads, providers=providers)
        except BidmatchError:
            raise
        except Exception as error:  # ONNX Runtime's own errors share no public base class
            raise DamagedError(f"{bundle.path}: {name} cannot be loaded: {error}") from error
        wide_dim = 0 if bundle.manifest.rescore is None else bundle.manifest.rescore.dim
        if problem := io_problem(session, bundle.manifest.dim, wide_dim):
            raise DamagedError(f"{bundle.path}: {name}: {problem}")
        super().__init__(session, load_tokenizer(bundle), bundle.manifest.dim, wide_dim)
        self.providers: list[str] = session.get_providers()
        self.fallback: str | None = None

    @classmethod
    def on(cls, bundle: Bundle, provider: Literal["auto", "cpu", "cuda"], threads: int = 1) -> QueryEncoder:
        """The encoder on a kind of device.

        Args:
            bundle: a verified bundle.
            provider: `cpu`; `cuda`, in fp32, refused where it does not work; `auto`, which takes CUDA where
                it works and else the CPU, and then says why in `fallback`.
            threads: threads of one `run`.

        Raises:
            DamagedError: see the class.
            ConfigError: CUDA is asked for and does not work.
        """
        if provider == "cpu":
            return cls(bundle, threads)
        # What ONNX Runtime would print, in colours, the error says.
        onnxruntime.set_default_logger_severity(4)
        with contextlib.redirect_stdout(io.StringIO()):
            # Of CUDA's libraries from PyPI's packages (extra `cuda`), which no loader would find.
            onnxruntime.preload_dlls()
        try:
            return cls(bundle, threads, providers=CUDA, precision="fp32")
        except ConfigError as error:
            if provider == "cuda":
                raise
            encoder = cls(bundle, threads)
            encoder.fallback = error.reason
            return encoder
        finally:
            onnxruntime.set_default_logger_severity(2)


def load_tokenizer(bundle: Bundle) -> Tokenizer:
    """The bundle's `tokenizers.Tokenizer`, its padding off (`pad` does it), its truncation as trained.

    Raises:
        DamagedError: it is none.
    """
    raw = bundle.read_bytes(TOKENIZER)
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception as error:  # tokenizers raises bare Exception
        raise DamagedError(f"{bundle.path}: {TOKENIZER} cannot be loaded: {error}") from error
    tokenizer.no_padding()
    return tokenizer
