from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.quantise import quantise, quantise_word_vectors

WORDS = np.random.default_rng(0).standard_normal((2000, 8)).astype(np.float32)
WORDS[7] *= 1e6  # a scale a word: one outlier must not spoil the others
WORDS[8] = 0


def gather_model(table):
    graph = helper.make_graph(
        [helper.make_node("Gather", ["words", "ids"], ["out"], "look_up")],
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", "t"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", "t", 8])],
        [numpy_helper.from_array(table, "words")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def run(model, ids):
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"ids": ids}
    )[0]


def test_a_word_vector_is_off_by_half_a_step_of_its_own_scale_at_most():
    model = gather_model(WORDS)
    assert quantise_word_vectors(model) == 1
    ids = np.arange(2000).reshape(40, 50)
    step = np.abs(WORDS).max(axis=1, keepdims=True)[ids] / 127
    assert (np.abs(run(model, ids) - WORDS[ids]) <= step / 2 * 1.001).all()


def test_the_floats_are_gone_from_the_file(tmp_path):
    onnx.save(gather_model(WORDS), str(tmp_path / "fp32.onnx"))
    assert quantise(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", products=False) == ["Gather"]
    assert (tmp_path / "int8.onnx").stat().st_size < WORDS.nbytes / 2


def test_a_small_table_stays():
    model = gather_model(WORDS[:500])
    before = model.SerializeToString()
    assert quantise_word_vectors(model) == 0
    assert model.SerializeToString() == before


@pytest.mark.parametrize("times", [1, 2])
def test_a_table_used_twice_is_stored_once(times):
    model = gather_model(WORDS)
    for i in range(1, times):
        model.graph.node.append(helper.make_node("Gather", ["words", "ids"], [f"out{i}"], f"look_up{i}"))
    assert quantise_word_vectors(model) == 1
    assert [tensor.name for tensor in model.graph.initializer] == ["words_int8", "words_scale"]
