// Searches an HNSW graph as hnswlib saved it, where it lies: the bytes may be a mapped file that processes share.
//
// Layout (hnswlib 0.8, 64-bit little-endian): a header, then `count` nodes of
//   links at level 0 (uint32 number, uint32 x max_links0), vector (float32 x dim), label (uint64),
// then for each node a uint32 size and that many bytes of links above level 0, (1 + M) uint32 a level.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "search.h"

namespace bidmatch {

struct Layout {
    size_t header_bytes, count, dim, M, max_links0, node_bytes, vector_offset, label_offset;
    int max_level;
    uint32_t entry;
};

class Graph {
   public:
    Graph(const uint8_t* data, size_t bytes, const Layout& layout)
        : nodes_(data + layout.header_bytes), at_(layout), dot_(kernels().dot) {
        const size_t level0 = at_.header_bytes + at_.count * at_.node_bytes;
        if (bytes < level0) throw std::invalid_argument("the index ends within its nodes");
        if (at_.count == 0 || at_.entry >= at_.count) throw std::invalid_argument("the index has no entry");
        const size_t links_bytes = (1 + at_.M) * sizeof(uint32_t);
        size_t at = level0;
        for (size_t node = 0; node < at_.count; ++node) {
            uint32_t size = 0;
            if (bytes - at < sizeof size) throw std::invalid_argument("the index ends within its upper levels");
            std::memcpy(&size, data + at, sizeof size);
            at += sizeof size;
            if (size == 0) continue;
            if (size % links_bytes || size > bytes - at)
                throw std::invalid_argument("the index has upper links of a wrong size at node " + std::to_string(node));
            upper_nodes_.push_back(static_cast<uint32_t>(node));
            upper_links_.push_back(reinterpret_cast<const uint8_t*>(data + at));
            upper_levels_.push_back(static_cast<uint8_t>(std::min<size_t>(size / links_bytes, 255)));
            at += size;
        }
    }

    size_t count() const { return at_.count; }
    size_t dim() const { return at_.dim; }

    // The row that a node stands for; `count` where the file names one that is not there.
    uint64_t label(uint32_t node) const {
        uint64_t label;
        std::memcpy(&label, this->node(node) + at_.label_offset, sizeof label);
        return std::min<uint64_t>(label, at_.count);
    }

    const float* vector(uint32_t node) const {
        return reinterpret_cast<const float*>(this->node(node) + at_.vector_offset);
    }

    // The best `ef` nodes (`k` at least) among those that the rules admit, in no order, as labels.
    // Returns false where more than `budget` vectors were compared, which leaves the result unfinished.
    bool search(const float* query, size_t ef, const Rules& rules, size_t budget, Best& best) const {
        Scratch& own = scratch();
        own.visited.resize(at_.count);
        own.candidates.clear();
        own.top.clear();
        const uint32_t start = descend(query);
        bool finished;
        if (rules.any())
            finished = level0<true>(query, ef, rules, budget, start, own);
        else
            finished = level0<false>(query, ef, rules, budget, start, own);
        own.visited.clear();
        for (const Scored& found : own.top.items()) {
            const uint64_t row = label(found.node);
            if (row < at_.count) best.offer(found.score, static_cast<uint32_t>(row));
        }
        return finished;
    }

   private:
    const uint8_t* node(uint32_t node) const { return nodes_ + size_t(node) * at_.node_bytes; }

    bool admits(const Rules& rules, uint32_t node) const {
        const uint64_t row = label(node);
        return row < at_.count && rules.admits(row);
    }

    static uint32_t number(const uint8_t* links, size_t most) {
        uint32_t count;
        std::memcpy(&count, links, sizeof count);
        return std::min<uint32_t>(count & 0xffff, static_cast<uint32_t>(most));
    }

    const uint8_t* links_above(uint32_t node, int level) const {
        const auto found = std::lower_bound(upper_nodes_.begin(), upper_nodes_.end(), node);
        if (found == upper_nodes_.end() || *found != node) return nullptr;
        const size_t place = static_cast<size_t>(found - upper_nodes_.begin());
        if (level > upper_levels_[place]) return nullptr;
        return upper_links_[place] + size_t(level - 1) * (1 + at_.M) * sizeof(uint32_t);
    }

    // From the entry down to level 1, each time to the nearest node.
    uint32_t descend(const float* query) const {
        uint32_t current = at_.entry;
        float score = dot_(query, vector(current), at_.dim);
        for (int level = at_.max_level; level > 0; --level) {
            for (bool moved = true; moved;) {
                moved = false;
                const uint8_t* links = links_above(current, level);
                if (!links) break;
                const uint32_t count = number(links, at_.M);
                const uint32_t* ids = reinterpret_cast<const uint32_t*>(links) + 1;
                for (uint32_t i = 0; i < count; ++i)
                    if (ids[i] < at_.count) prefetch_vector(vector(ids[i]), at_.dim);
                for (uint32_t i = 0; i < count; ++i) {
                    if (ids[i] >= at_.count) continue;
                    const float other = dot_(query, vector(ids[i]), at_.dim);
                    if (other > score) {
                        score = other;
                        current = ids[i];
                        moved = true;
                    }
                }
            }
        }
        return current;
    }

    template <bool ruled>
    bool level0(const float* query, size_t ef, const Rules& rules, size_t budget, uint32_t start, Scratch& own) const {
        const float least = -std::numeric_limits<float>::infinity();
        const float first = dot_(query, vector(start), at_.dim);
        own.visited.visit(start);
        own.candidates.push({first, start});
        if (!ruled || admits(rules, start)) own.top.push({first, start});
        size_t compared = 1;
        uint32_t fresh[512];
        while (!own.candidates.empty()) {
            const Scored nearest = own.candidates.front();
            if (own.top.size() >= ef && nearest.score < own.top.front().score) break;
            own.candidates.pop();
            const uint8_t* here = node(nearest.node);
            const uint32_t count = number(here, at_.max_links0);
            const uint32_t* ids = reinterpret_cast<const uint32_t*>(here) + 1;
            uint32_t found = 0;
            for (uint32_t i = 0; i < count && found < 512; ++i) {
                if (ids[i] >= at_.count || !own.visited.visit(ids[i])) continue;
                prefetch_vector(vector(ids[i]), at_.dim);
                fresh[found++] = ids[i];
            }
            compared += found;
            if (ruled && compared > budget) return false;
            for (uint32_t i = 0; i < found; ++i) {
                const float score = dot_(query, vector(fresh[i]), at_.dim);
                const float bound = own.top.size() < ef ? least : own.top.front().score;
                if (!(score > bound)) continue;
                own.candidates.push({score, fresh[i]});
                prefetch(node(own.candidates.front().node));
                if (ruled && !admits(rules, fresh[i])) continue;
                own.top.push({score, fresh[i]});
                if (own.top.size() > ef) own.top.pop();
            }
        }
        return true;
    }

    const uint8_t* nodes_;
    Layout at_;
    Dot dot_;
    // The nodes above level 0, a sixteenth of all or so.
    std::vector<uint32_t> upper_nodes_;
    std::vector<const uint8_t*> upper_links_;
    std::vector<uint8_t> upper_levels_;
};

}  // namespace bidmatch
