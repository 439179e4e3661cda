// Searches an HNSW graph where its arrays lie: they may be mapped files that processes share.
//
// The walk goes by vectors in 8 bits, a quarter of the memory that single precision would take from all over, and
// what it ends with is scored anew by the vectors themselves.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "search.h"

namespace bidmatch {

// `count` rows of width `dim`. Links and rows that a damaged array makes too large are not followed.
struct Arrays {
    size_t count, dim;
    const float* vectors;    // (count, dim)
    const int8_t* codes;     // (count, dim): vectors / steps, rounded
    const float* steps;      // (dim)
    const uint32_t* links;   // (count, degree): neighbours at level 0, filled up with numbers of no row
    size_t degree;
    // (upper_count, 2 + upper_degree), from the top level down: a row; where the row stands one level below in
    // this array, or no number of it at level 1; and neighbours, as places in this array. The first is the entry.
    const uint32_t* upper;
    size_t upper_count, upper_degree;
};

class Graph {
   public:
    explicit Graph(const Arrays& arrays)
        : at_(arrays), dot_(kernels().dot), dot_codes_(kernels().dot_codes) {}

    size_t count() const { return at_.count; }
    size_t dim() const { return at_.dim; }
    const float* vector(size_t row) const { return at_.vectors + row * at_.dim; }

    // The best rows by their vectors among the `ef` best by their codes of those that the rules admit.
    // Returns false where more than `budget` codes were compared, which leaves the result unfinished.
    bool search(const float* query, size_t ef, const Rules& rules, size_t budget, Best& best) const {
        if (at_.count == 0) return true;
        Scratch& own = scratch();
        own.visited.resize(at_.count);
        own.candidates.clear();
        own.top.clear();
        own.coded.resize(at_.dim);
        encode(query, own.coded.data());
        const int16_t* coded = own.coded.data();
        const uint32_t start = descend(coded);
        const bool finished = rules.any() ? level0<true>(coded, ef, rules, budget, start, own)
                                          : level0<false>(coded, ef, rules, budget, start, own);
        own.visited.clear();
        const std::vector<Scored>& found = own.top.items();
        constexpr size_t kAhead = 8;
        for (size_t i = 0; i < std::min(kAhead, found.size()); ++i) prefetch_vector(vector(found[i].node), at_.dim);
        for (size_t i = 0; i < found.size(); ++i) {
            if (i + kAhead < found.size()) prefetch_vector(vector(found[i + kAhead].node), at_.dim);
            best.offer(dot_(query, vector(found[i].node), at_.dim), found[i].node);
        }
        return finished;
    }

   private:
    // The query times the codes' steps in 15 bits, less where the sum of so many products could overflow.
    void encode(const float* query, int16_t* coded) const {
        const float most = std::min(16383.0f, 2147483647.0f / (127.0f * static_cast<float>(at_.dim)));
        float largest = 0;
        for (size_t i = 0; i < at_.dim; ++i) largest = std::max(largest, std::fabs(query[i] * at_.steps[i]));
        const float scale = largest > 0 ? most / largest : 0;
        for (size_t i = 0; i < at_.dim; ++i)
            coded[i] = static_cast<int16_t>(std::lrintf(query[i] * at_.steps[i] * scale));
    }

    float score(const int16_t* coded, uint32_t row) const {
        return static_cast<float>(dot_codes_(coded, codes(row), at_.dim));
    }

    const int8_t* codes(uint32_t row) const { return at_.codes + size_t(row) * at_.dim; }
    void prefetch_codes(uint32_t row) const {
        const char* start = reinterpret_cast<const char*>(codes(row));
        for (size_t at = 0; at < at_.dim; at += 64) prefetch(start + at);
    }

    const uint32_t* place(size_t at) const { return at_.upper + at * (2 + at_.upper_degree); }

    // From the entry down to level 1, each time to the nearest row.
    uint32_t descend(const int16_t* coded) const {
        if (at_.upper_count == 0 || place(0)[0] >= at_.count) return 0;
        size_t current = 0;
        float nearest = score(coded, place(0)[0]);
        while (true) {
            for (bool moved = true; moved;) {
                moved = false;
                const uint32_t* ids = place(current) + 2;
                for (size_t i = 0; i < at_.upper_degree; ++i) {
                    if (ids[i] >= at_.upper_count) break;
                    const uint32_t row = place(ids[i])[0];
                    if (row < at_.count) prefetch_codes(row);
                }
                for (size_t i = 0; i < at_.upper_degree; ++i) {
                    if (ids[i] >= at_.upper_count) break;
                    const uint32_t row = place(ids[i])[0];
                    if (row >= at_.count) continue;
                    const float other = score(coded, row);
                    if (other > nearest) {
                        nearest = other;
                        current = ids[i];
                        moved = true;
                    }
                }
            }
            const uint32_t below = place(current)[1];
            if (below >= at_.upper_count || below <= current || place(below)[0] >= at_.count)
                return place(current)[0];
            current = below;
        }
    }

    template <bool ruled>
    bool level0(const int16_t* coded, size_t ef, const Rules& rules, size_t budget, uint32_t start,
                Scratch& own) const {
        const float least = -std::numeric_limits<float>::infinity();
        const float first = score(coded, start);
        own.visited.visit(start);
        own.candidates.push({first, start});
        if (!ruled || rules.admits(start)) own.top.push({first, start});
        size_t compared = 1;
        uint32_t fresh[512];
        while (!own.candidates.empty()) {
            const Scored nearest = own.candidates.front();
            if (own.top.size() >= ef && nearest.score < own.top.front().score) break;
            own.candidates.pop();
            const uint32_t* ids = at_.links + size_t(nearest.node) * at_.degree;
            uint32_t found = 0;
            for (size_t i = 0; i < at_.degree && found < 512; ++i) {
                if (ids[i] >= at_.count) break;
                if (!own.visited.visit(ids[i])) continue;
                prefetch_codes(ids[i]);
                fresh[found++] = ids[i];
            }
            compared += found;
            if (ruled && compared > budget) return false;
            for (uint32_t i = 0; i < found; ++i) {
                const float other = score(coded, fresh[i]);
                const float bound = own.top.size() < ef ? least : own.top.front().score;
                if (!(other > bound)) continue;
                own.candidates.push({other, fresh[i]});
                prefetch_links(own.candidates.front().node);
                if (ruled && !rules.admits(fresh[i])) continue;
                own.top.push({other, fresh[i]});
                if (own.top.size() > ef) own.top.pop();
            }
        }
        return true;
    }

    void prefetch_links(uint32_t row) const {
        const char* start = reinterpret_cast<const char*>(at_.links + size_t(row) * at_.degree);
        for (size_t at = 0; at < at_.degree * sizeof(uint32_t); at += 64) prefetch(start + at);
    }

    Arrays at_;
    Dot dot_;
    DotCodes dot_codes_;
};

}  // namespace bidmatch
