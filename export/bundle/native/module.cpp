// Python's view of the searches: arrays in, arrays out, the GIL released in between.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>

#include "graph.h"
#include "live_graph.h"

namespace py = pybind11;

namespace bidmatch {
namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;
using Floats = Array<float>;
using Bits = std::optional<Array<uint8_t>>;
using Rows32 = std::optional<Array<int32_t>>;
using Rows64 = std::optional<Array<int64_t>>;

struct Split {
    size_t at;
    float encoder_weight, classifier_weight;
};

struct Queries {
    const float* data;
    size_t count, dim;
    const float* operator[](size_t i) const { return data + i * dim; }
};

Queries queries_of(const Floats& array, size_t dim) {
    if (array.ndim() != 2 || static_cast<size_t>(array.shape(1)) != dim)
        throw py::value_error("queries must be float32 (n, " + std::to_string(dim) + ")");
    return {array.data(), static_cast<size_t>(array.shape(0)), dim};
}

const uint8_t* bits_of(const Bits& bits, size_t rows, const char* name) {
    if (!bits) return nullptr;
    if (bits->ndim() != 1 || static_cast<size_t>(bits->size()) * 8 < rows)
        throw py::value_error(std::string(name) + " must hold a bit for each row");
    return bits->data();
}

// Rows that each query denies: query i's are rows[offsets[i] : offsets[i + 1]], sorted.
class Denied {
   public:
    Denied(const Rows64& offsets, const Rows32& rows, size_t queries) {
        if (offsets.has_value() != rows.has_value())
            throw py::value_error("denied_offsets and denied_rows belong together");
        if (!offsets) return;
        if (static_cast<size_t>(offsets->size()) != queries + 1)
            throw py::value_error("denied_offsets must have one more than there are queries");
        offsets_ = offsets->data();
        rows_ = rows->data();
        for (size_t i = 0; i < queries; ++i)
            if (offsets_[i] > offsets_[i + 1] || offsets_[i] < 0 || offsets_[i + 1] > rows->size())
                throw py::value_error("denied_offsets must rise within denied_rows");
    }
    void apply(Rules& rules, size_t query) const {
        if (!offsets_) return;
        rules.denied = rows_ + offsets_[query];
        rules.denied_count = static_cast<size_t>(offsets_[query + 1] - offsets_[query]);
    }

   private:
    const int64_t* offsets_ = nullptr;
    const int32_t* rows_ = nullptr;
};

// Rows (-1 where fewer were found) and both parts of their scores, (n, k) each.
struct Found {
    Found(size_t n, size_t k)
        : k(k), rows({n, k}), encoder({n, k}), classifier({n, k}),
          rows_(rows.mutable_data()), encoder_(encoder.mutable_data()), classifier_(classifier.mutable_data()) {}

    template <class VectorOf>
    void write(size_t query, const float* vector, Best& best, const Split& split, size_t dim, VectorOf vector_of,
               int64_t first = 0) {
        const Dot dot = kernels().dot;
        const std::vector<Scored>& items = best.sorted();
        for (size_t i = 0; i < k; ++i) {
            const size_t at = query * k + i;
            if (i >= items.size()) {
                rows_[at] = -1;
                encoder_[at] = classifier_[at] = 0;
                continue;
            }
            const float* found = vector_of(items[i].node);
            const float d = dot(vector, found, split.at);
            const float c = dot(vector + split.at, found + split.at, dim - split.at);
            rows_[at] = first + items[i].node;
            // Rounding puts the cosine of equal vectors a little above 1.
            encoder_[at] = std::max(-split.encoder_weight, std::min(split.encoder_weight, d));
            classifier_[at] = std::max(-split.classifier_weight, std::min(split.classifier_weight, c));
        }
    }

    py::tuple tuple() { return py::make_tuple(rows, encoder, classifier); }

    size_t k;
    Array<int64_t> rows;
    Floats encoder, classifier;

   private:
    int64_t* rows_;
    float* encoder_;
    float* classifier_;
};

void check_k(size_t k) {
    if (k < 1) throw py::value_error("k must be at least 1");
}

// float32 (rows, columns) and its like, C-contiguous.
template <class T>
void check_shape(const Array<T>& array, const char* name, size_t rows, size_t columns) {
    if (array.ndim() != 2 || static_cast<size_t>(array.shape(0)) != rows ||
        static_cast<size_t>(array.shape(1)) != columns)
        throw py::value_error(std::string(name) + " must have the shape (" + std::to_string(rows) + ", " +
                              std::to_string(columns) + ")");
}

class PyGraph {
   public:
    PyGraph(Floats vectors, Array<int8_t> codes, Floats steps, Array<uint32_t> links, Array<uint32_t> upper,
            size_t split, float encoder_weight, float classifier_weight)
        : vectors_(std::move(vectors)), codes_(std::move(codes)), steps_(std::move(steps)), links_(std::move(links)),
          upper_(std::move(upper)), split_{split, encoder_weight, classifier_weight} {
        if (vectors_.ndim() != 2) throw py::value_error("vectors must be float32 (L, dim)");
        if (links_.ndim() != 2) throw py::value_error("links must be uint32 (L, degree)");
        if (upper_.ndim() != 2 || upper_.shape(1) < 2) throw py::value_error("upper must be uint32 (n, 2 + degree)");
        const size_t count = static_cast<size_t>(vectors_.shape(0)), dim = static_cast<size_t>(vectors_.shape(1));
        const size_t degree = static_cast<size_t>(links_.shape(1));
        check_shape(codes_, "codes", count, dim);
        check_shape(steps_, "steps", 1, dim);
        check_shape(links_, "links", count, degree);
        if (split > dim) throw py::value_error("split is beyond the vectors' width");
        graph_ = std::make_unique<Graph>(Arrays{count, dim, vectors_.data(), codes_.data(), steps_.data(), links_.data(),
                                                degree, upper_.data(), static_cast<size_t>(upper_.shape(0)),
                                                static_cast<size_t>(upper_.shape(1)) - 2});
        rows_ = vectors_.data();
    }

    size_t count() const { return graph_->count(); }

    py::tuple search(const Floats& queries, size_t k, size_t ef, const Bits& allowed, size_t admitted, const Bits& off,
                     const Rows64& denied_offsets, const Rows32& denied_rows) const {
        check_k(k);
        const Queries all = queries_of(queries, graph_->dim());
        const size_t count = graph_->count();
        Rules shared;
        shared.allowed = bits_of(allowed, count, "allowed");
        shared.off = bits_of(off, count, "off");
        const Denied denied(denied_offsets, denied_rows, all.count);
        admitted = std::min(admitted, count);
        k = std::min(k, std::max<size_t>(admitted, 1));
        Found found(all.count, k);
        {
            py::gil_scoped_release release;
            for (size_t i = 0; i < all.count; ++i) {
                Rules rules = shared;
                denied.apply(rules, i);
                Best best(k);
                // Comparing more vectors than there are admitted ones costs more than comparing just those.
                const size_t budget = shared.allowed ? admitted : count;
                bool good = graph_->search(all[i], std::max(ef, k), rules, budget, best);
                if (!good || !best.full()) {
                    best = Best(k);
                    scan(all[i], nullptr, 0, rules, best);
                }
                write(found, i, all[i], best);
            }
        }
        return found.tuple();
    }

    py::tuple exact(const Floats& queries, size_t k, const Rows32& rows, const Bits& allowed, const Bits& off,
                    const Rows64& denied_offsets, const Rows32& denied_rows) const {
        check_k(k);
        const Queries all = queries_of(queries, graph_->dim());
        const size_t count = graph_->count();
        Rules shared;
        shared.allowed = bits_of(allowed, count, "allowed");
        shared.off = bits_of(off, count, "off");
        const Denied denied(denied_offsets, denied_rows, all.count);
        const int32_t* list = rows ? rows->data() : nullptr;
        const size_t listed = rows ? static_cast<size_t>(rows->size()) : 0;
        for (size_t i = 0; i < listed; ++i)
            if (list[i] < 0 || static_cast<size_t>(list[i]) >= count) throw py::index_error("there is no such row");
        k = std::min(k, std::max<size_t>(rows ? listed : count, 1));
        Found found(all.count, k);
        {
            py::gil_scoped_release release;
            for (size_t i = 0; i < all.count; ++i) {
                Rules rules = shared;
                denied.apply(rules, i);
                Best best(k);
                scan(all[i], rows ? list : nullptr, listed, rules, best);
                write(found, i, all[i], best);
            }
        }
        return found.tuple();
    }

   private:
    // Of the listed rows, or of all where there is no list.
    void scan(const float* query, const int32_t* list, size_t listed, const Rules& rules, Best& best) const {
        constexpr size_t kAhead = 8;
        const Dot dot = kernels().dot;
        const size_t dim = graph_->dim(), total = list ? listed : graph_->count();
        const bool ruled = rules.any();
        for (size_t i = 0; i < total; ++i) {
            const size_t row = list ? static_cast<size_t>(list[i]) : i;
            if (list && i + kAhead < total) prefetch_vector(rows_ + size_t(list[i + kAhead]) * dim, dim);
            if (ruled && !rules.admits(row)) continue;
            const float score = dot(query, rows_ + row * dim, dim);
            if (!(score < best.worst())) best.offer(score, static_cast<uint32_t>(row));
        }
    }

    void write(Found& found, size_t i, const float* query, Best& best) const {
        const size_t dim = graph_->dim();
        found.write(i, query, best, split_, dim, [this, dim](uint32_t row) { return rows_ + size_t(row) * dim; });
    }

    Floats vectors_;
    Array<int8_t> codes_;
    Floats steps_;
    Array<uint32_t> links_, upper_;
    Split split_;
    std::unique_ptr<Graph> graph_;
    const float* rows_;
};

class PyLiveGraph {
   public:
    PyLiveGraph(size_t dim, size_t M, size_t ef_construction, uint64_t seed, size_t split, float encoder_weight,
                float classifier_weight)
        : graph_(std::make_unique<LiveGraph>(dim, M, ef_construction, seed)),
          split_{split, encoder_weight, classifier_weight} {
        if (split > dim) throw py::value_error("split is beyond the vectors' width");
    }

    size_t count() const { return graph_->count(); }
    size_t linked() const { return graph_->linked(); }

    size_t append(const Floats& vectors, const Array<uint8_t>& searchable) {
        const Queries rows = queries_of(vectors, graph_->dim());
        if (static_cast<size_t>(searchable.size()) != rows.count)
            throw py::value_error("searchable must have a value for each row");
        py::gil_scoped_release release;
        return graph_->append(rows.data, searchable.data(), rows.count);
    }

    size_t link(size_t most) {
        py::gil_scoped_release release;
        return graph_->link(most);
    }

    py::tuple search(const Floats& queries, size_t k, size_t ef, size_t limit, const Bits& allowed, const Bits& off,
                     const Rows64& denied_offsets, const Rows32& denied_rows, bool exactly, int64_t first) const {
        check_k(k);
        const Queries all = queries_of(queries, graph_->dim());
        limit = std::min(limit, graph_->count());
        Rules shared;
        shared.limit = limit;
        shared.allowed = bits_of(allowed, limit, "allowed");
        shared.off = bits_of(off, limit, "off");
        const Denied denied(denied_offsets, denied_rows, all.count);
        k = std::min(k, std::max<size_t>(limit, 1));
        Found found(all.count, k);
        {
            py::gil_scoped_release release;
            for (size_t i = 0; i < all.count; ++i) {
                Rules rules = shared;
                denied.apply(rules, i);
                Best best(k);
                if (exactly)
                    graph_->exact(all[i], rules, best);
                else
                    graph_->search(all[i], std::max(ef, k), rules, best);
                if (!exactly && !best.full()) {
                    best = Best(k);
                    graph_->exact(all[i], rules, best);
                }
                found.write(i, all[i], best, split_, graph_->dim(), [this](uint32_t row) { return graph_->vector(row); },
                            first);
            }
        }
        return found.tuple();
    }

    // Both parts of the scores of given rows, (n, c) each; of a row of -1, 0.
    py::tuple score(const Floats& queries, const Array<int64_t>& rows) const {
        const Queries all = queries_of(queries, graph_->dim());
        if (rows.ndim() != 2 || static_cast<size_t>(rows.shape(0)) != all.count)
            throw py::value_error("rows must be int64 (n, c)");
        const size_t c = static_cast<size_t>(rows.shape(1)), count = graph_->count(), dim = graph_->dim();
        Floats encoder({all.count, c}), classifier({all.count, c});
        const Dot dot = kernels().dot;
        for (size_t i = 0; i < all.count * c; ++i) {
            const int64_t row = rows.data()[i];
            if (row >= static_cast<int64_t>(count)) throw py::index_error("there is no such row");
            const float* query = all[i / c];
            const float* found = row < 0 ? nullptr : graph_->vector(static_cast<size_t>(row));
            const float d = found ? dot(query, found, split_.at) : 0;
            const float k = found ? dot(query + split_.at, found + split_.at, dim - split_.at) : 0;
            encoder.mutable_data()[i] = std::max(-split_.encoder_weight, std::min(split_.encoder_weight, d));
            classifier.mutable_data()[i] = std::max(-split_.classifier_weight, std::min(split_.classifier_weight, k));
        }
        return py::make_tuple(encoder, classifier);
    }

   private:
    std::unique_ptr<LiveGraph> graph_;
    Split split_;
};

// Both parts of the scores by wide vectors in 8 bits, (n, c) each; of a row of -1, 0.
py::tuple score_wide(const Floats& queries, const Array<int64_t>& rows, const Array<int8_t>& wide, const Floats& scales,
                     size_t split, float encoder_weight, float classifier_weight) {
    if (wide.ndim() != 2 || scales.ndim() != 2 || scales.shape(0) != wide.shape(0) || scales.shape(1) != 2)
        throw py::value_error("wide must be int8 (L, dim) and scales float32 (L, 2)");
    const size_t dim = static_cast<size_t>(wide.shape(1));
    const int64_t count = wide.shape(0);
    if (split > dim) throw py::value_error("split is beyond the vectors' width");
    if (queries.ndim() != 2 || static_cast<size_t>(queries.shape(1)) != dim || rows.ndim() != 2 ||
        rows.shape(0) != queries.shape(0))
        throw py::value_error("queries (" + std::to_string(queries.shape(0)) + ", " +
                              std::to_string(queries.ndim() == 2 ? queries.shape(1) : 0) + ") do not fit " +
                              std::to_string(rows.shape(0)) + " lists, width " + std::to_string(dim));
    const Queries all{queries.data(), static_cast<size_t>(queries.shape(0)), dim};
    const size_t c = static_cast<size_t>(rows.shape(1));
    const int64_t* list = rows.data();
    for (size_t i = 0; i < all.count * c; ++i)
        if (list[i] >= count || list[i] < -1) throw py::index_error("there is no such row");
    Floats encoder({all.count, c}), classifier({all.count, c});
    float* d = encoder.mutable_data();
    float* k = classifier.mutable_data();
    const int8_t* values = wide.data();
    const float* scale = scales.data();
    {
        py::gil_scoped_release release;
        constexpr size_t kAhead = 4;
        const DotInt8 dot = kernels().dot_int8;
        for (size_t i = 0; i < all.count * c; ++i) {
            if (i + kAhead < all.count * c && list[i + kAhead] >= 0) {
                const char* next = reinterpret_cast<const char*>(values + size_t(list[i + kAhead]) * dim);
                for (size_t at = 0; at < dim; at += 64) prefetch(next + at);
            }
            if (list[i] < 0) {
                d[i] = k[i] = 0;
                continue;
            }
            const float* query = all[i / c];
            const int8_t* row = values + size_t(list[i]) * dim;
            const float a = dot(query, row, split) * scale[2 * list[i]];
            const float b = dot(query + split, row + split, dim - split) * scale[2 * list[i] + 1];
            d[i] = std::max(-encoder_weight, std::min(encoder_weight, a));
            k[i] = std::max(-classifier_weight, std::min(classifier_weight, b));
        }
    }
    return py::make_tuple(encoder, classifier);
}

// Where a file of hnswlib's has links above level 0: nodes, their top levels, where their links begin.
py::tuple hnswlib_upper(const Array<uint8_t>& data, size_t start, size_t count, size_t links_bytes) {
    const uint8_t* bytes = data.data();
    const size_t total = static_cast<size_t>(data.size());
    if (start > total || links_bytes == 0) throw py::value_error("the index ends within its nodes");
    std::vector<int64_t> nodes, levels, places;
    size_t at = start;
    for (size_t node = 0; node < count; ++node) {
        uint32_t size = 0;
        if (total - at < sizeof size) throw py::value_error("the index ends within its upper levels");
        std::memcpy(&size, bytes + at, sizeof size);
        at += sizeof size;
        if (size == 0) continue;
        if (size % links_bytes || size > total - at)
            throw py::value_error("the index has upper links of a wrong size at node " + std::to_string(node));
        nodes.push_back(static_cast<int64_t>(node));
        levels.push_back(static_cast<int64_t>(size / links_bytes));
        places.push_back(static_cast<int64_t>(at));
        at += size;
    }
    const auto array = [](const std::vector<int64_t>& values) {
        return Array<int64_t>(static_cast<py::ssize_t>(values.size()), values.data());
    };
    return py::make_tuple(array(nodes), array(levels), array(places));
}

}  // namespace
}  // namespace bidmatch

PYBIND11_MODULE(_native, module) {
    using namespace bidmatch;
    module.doc() = "Search over HNSW graphs, exact search, and scores by wide vectors. See _native.pyi.";
    module.attr("KERNELS") = kernels().name;
    const py::arg_v allowed = py::arg("allowed") = py::none(), off = py::arg("off") = py::none();
    const py::arg_v offsets = py::arg("denied_offsets") = py::none(), rows = py::arg("denied_rows") = py::none();

    py::class_<PyGraph>(module, "Graph")
        .def(py::init<Floats, Array<int8_t>, Floats, Array<uint32_t>, Array<uint32_t>, size_t, float, float>(),
             py::arg("vectors").noconvert(), py::arg("codes").noconvert(), py::arg("steps").noconvert(),
             py::arg("links").noconvert(), py::arg("upper").noconvert(), py::kw_only(), py::arg("split"),
             py::arg("encoder_weight"), py::arg("classifier_weight"))
        .def("__len__", &PyGraph::count)
        .def("search", &PyGraph::search, py::arg("queries"), py::arg("k"), py::arg("ef"), py::kw_only(), allowed,
             py::arg("admitted") = std::numeric_limits<size_t>::max(), off, offsets, rows)
        .def("exact", &PyGraph::exact, py::arg("queries"), py::arg("k"), py::kw_only(),
             py::arg("rows") = py::none(), allowed, off, offsets, rows);

    py::class_<PyLiveGraph>(module, "LiveGraph")
        .def(py::init<size_t, size_t, size_t, uint64_t, size_t, float, float>(), py::arg("dim"), py::kw_only(),
             py::arg("M"), py::arg("ef_construction"), py::arg("seed"), py::arg("split"), py::arg("encoder_weight"),
             py::arg("classifier_weight"))
        .def("__len__", &PyLiveGraph::count)
        .def_property_readonly("linked", &PyLiveGraph::linked)
        .def("append", &PyLiveGraph::append, py::arg("vectors"), py::arg("searchable"))
        .def("link", &PyLiveGraph::link, py::arg("most"))
        .def("search", &PyLiveGraph::search, py::arg("queries"), py::arg("k"), py::arg("ef"), py::arg("limit"),
             py::kw_only(), allowed, off, offsets, rows, py::arg("exactly") = false,
             py::arg("first") = 0)
        .def("score", &PyLiveGraph::score, py::arg("queries"), py::arg("rows"));

    module.def("hnswlib_upper", &hnswlib_upper, py::arg("data").noconvert(), py::arg("start"), py::arg("count"),
               py::arg("links_bytes"));
    module.def("score_wide", &score_wide, py::arg("queries"), py::arg("rows"), py::arg("wide"), py::arg("scales"),
               py::kw_only(), py::arg("split"), py::arg("encoder_weight"), py::arg("classifier_weight"));
}
