// Matches in columns to the JSON of answers, and filters of the ids that are in them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace bidmatch {
namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

constexpr size_t kFilterWords = 4;
using Filter = std::array<uint64_t, kFilterWords>;

// FNV-1a, its bits mixed: the filter takes the lowest ones.
uint64_t hash(std::string_view text) {
    uint64_t h = 14695981039346656037ull;
    for (const unsigned char c : text) h = (h ^ c) * 1099511628211ull;
    h ^= h >> 32;
    h *= 0x9e3779b97f4a7c15ull;
    return h ^ h >> 29;
}

void add_to(uint64_t* filter, std::string_view id) {
    const uint64_t mixed = hash(id);
    for (const int shift : {0, 8}) {
        const uint64_t bit = mixed >> shift & 255;
        filter[bit >> 6] |= uint64_t{1} << (bit & 63);
    }
}

void write_text(std::string& out, std::string_view text) {
    static constexpr char kHex[] = "0123456789abcdef";
    out += '"';
    size_t plain = 0;
    for (size_t at = 0; at < text.size(); ++at) {
        const unsigned char c = text[at];
        if (c >= 0x20 && c != '"' && c != '\\') continue;
        out.append(text.substr(plain, at - plain));
        plain = at + 1;
        out += '\\';
        switch (c) {
            case '"':
            case '\\': out += static_cast<char>(c); break;
            case '\n': out += 'n'; break;
            case '\t': out += 't'; break;
            case '\r': out += 'r'; break;
            case '\b': out += 'b'; break;
            case '\f': out += 'f'; break;
            default:
                out += "u00";
                out += kHex[c >> 4];
                out += kHex[c & 15];
        }
    }
    out.append(text.substr(plain));
    out += '"';
}

// With the fewest digits that give the same float, and never as a whole number.
void write_number(std::string& out, float value) {
    if (!std::isfinite(value)) {
        out += "null";
        return;
    }
    char digits[32];
    const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
    const std::string_view written(digits, static_cast<size_t>(end - digits));
    out.append(written);
    if (written.find_first_of(".e") == std::string_view::npos) out += ".0";
}

// A column of texts as Arrow has it: text i is data[offsets[i] : offsets[i + 1]].
class Texts {
   public:
    Texts(Array<int64_t> offsets, Array<uint8_t> data) : offsets_(std::move(offsets)), data_(std::move(data)) {
        if (offsets_.ndim() != 1 || offsets_.size() < 1 || data_.ndim() != 1)
            throw py::value_error("texts are offsets, int64 (L + 1), and data, uint8");
        count_ = static_cast<size_t>(offsets_.size()) - 1;
        at_ = offsets_.data();
        bytes_ = reinterpret_cast<const char*>(data_.data());
        if (at_[0] < 0 || at_[count_] > data_.size()) throw py::value_error("offsets lead beyond the data");
    }
    size_t count() const { return count_; }
    std::string_view operator[](size_t row) const {
        return {bytes_ + at_[row], static_cast<size_t>(at_[row + 1] - at_[row])};
    }

   private:
    Array<int64_t> offsets_;
    Array<uint8_t> data_;
    size_t count_;
    const int64_t* at_;
    const char* bytes_;
};

class Renderer {
   public:
    Renderer(Array<int64_t> id_offsets, Array<uint8_t> ids, Array<int64_t> text_offsets, Array<uint8_t> texts)
        : ids_(std::move(id_offsets), std::move(ids)), texts_(std::move(text_offsets), std::move(texts)) {
        if (ids_.count() != texts_.count()) throw py::value_error("there are not as many ids as texts");
    }

    py::tuple render(const Array<int64_t>& offsets, const Array<int64_t>& rows, const Array<float>& scores,
                     const Array<float>& encoder, const Array<float>& classifier,
                     const std::optional<Array<float>>& relevance, const Array<bool>& exact,
                     const std::vector<std::tuple<std::string, std::string, std::string>>& others,
                     const std::optional<std::vector<std::string>>& tails) const {
        const py::ssize_t total = rows.size();
        if (offsets.size() < 1) throw py::value_error("offsets must have one more than there are queries");
        for (const py::ssize_t size : {scores.size(), encoder.size(), classifier.size(), exact.size(),
                                       relevance ? relevance->size() : total,
                                       tails ? static_cast<py::ssize_t>(tails->size()) : total})
            if (size != total) throw py::value_error("columns of matches must be of one length");
        const size_t queries = static_cast<size_t>(offsets.size()) - 1;
        const int64_t* ends = offsets.data();
        for (size_t i = 0; i < queries; ++i)
            if (ends[i] > ends[i + 1]) throw py::value_error("offsets must rise");
        if (ends[0] != 0 || ends[queries] != total) throw py::value_error("offsets must span the matches");
        size_t live = 0;
        for (py::ssize_t at = 0; at < total; ++at) {
            if (rows.data()[at] < 0) throw py::index_error("there is no such row");
            live += static_cast<size_t>(rows.data()[at]) >= ids_.count();
        }
        if (live != others.size()) throw py::value_error("others must have a phrase for each row beyond the texts");

        Array<uint64_t> filters({queries, kFilterWords});
        Array<double> best(static_cast<py::ssize_t>(queries));
        std::vector<std::string> made(queries);
        {
            py::gil_scoped_release release;
            std::fill_n(filters.mutable_data(), queries * kFilterWords, uint64_t{0});
            size_t other = 0;
            for (size_t i = 0; i < queries; ++i) {
                std::string& out = made[i];
                uint64_t* filter = filters.mutable_data() + i * kFilterWords;
                double first = std::nan("");
                out.reserve(static_cast<size_t>(ends[i + 1] - ends[i]) * 200 + 2);
                out += '[';
                for (int64_t at = ends[i]; at < ends[i + 1]; ++at) {
                    const size_t row = static_cast<size_t>(rows.data()[at]);
                    const bool is_live = row >= ids_.count();
                    const std::string_view id = is_live ? std::string_view(std::get<0>(others[other])) : ids_[row];
                    const std::string_view text = is_live ? std::string_view(std::get<1>(others[other])) : texts_[row];
                    const bool equal = exact.data()[at];
                    if (!equal && std::isnan(first)) first = scores.data()[at];
                    add_to(filter, id);
                    out += at == ends[i] ? "{\"id\":" : ",{\"id\":";
                    write_text(out, id);
                    out += ",\"phrase\":";
                    write_text(out, text);
                    out += ",\"score\":";
                    write_number(out, scores.data()[at]);
                    out += ",\"parts\":{\"encoder\":";
                    write_number(out, encoder.data()[at]);
                    out += ",\"classifier\":";
                    write_number(out, classifier.data()[at]);
                    out += equal ? "},\"source\":\"exact\"" : is_live ? "},\"source\":\"live\"" : "},\"source\":\"index\"";
                    if (relevance) {
                        out += ",\"relevance\":";
                        write_number(out, relevance->data()[at]);
                    }
                    if (is_live)
                        out += std::get<2>(others[other++]);
                    else if (tails)
                        out += (*tails)[static_cast<size_t>(at)];
                    out += '}';
                }
                out += ']';
                best.mutable_data()[i] = first;
            }
        }
        py::list answers(queries);
        for (size_t i = 0; i < queries; ++i) answers[i] = py::bytes(made[i]);
        return py::make_tuple(answers, best, filters);
    }

   private:
    Texts ids_, texts_;
};

Array<uint64_t> id_filter(const std::vector<std::string>& ids) {
    Array<uint64_t> filter(static_cast<py::ssize_t>(kFilterWords));
    std::fill_n(filter.mutable_data(), kFilterWords, uint64_t{0});
    for (const std::string& id : ids) add_to(filter.mutable_data(), id);
    return filter;
}

}  // namespace
}  // namespace bidmatch

PYBIND11_MODULE(_native, module) {
    using namespace bidmatch;
    module.doc() = "The JSON of answers. See _native.pyi.";
    py::class_<Renderer>(module, "Renderer")
        .def(py::init<Array<int64_t>, Array<uint8_t>, Array<int64_t>, Array<uint8_t>>(),
             py::arg("id_offsets").noconvert(), py::arg("ids").noconvert(), py::arg("text_offsets").noconvert(),
             py::arg("texts").noconvert())
        .def("render", &Renderer::render, py::arg("offsets"), py::arg("rows"), py::arg("scores"), py::arg("encoder"),
             py::arg("classifier"), py::kw_only(), py::arg("relevance"), py::arg("exact"), py::arg("others"),
             py::arg("tails"));
    module.def("id_filter", &id_filter, py::arg("ids"));
}
