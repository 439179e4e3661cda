// An HNSW graph that one thread adds to while others search, without a lock in the search.
//
// A row is visible as soon as its vector is in place: rows that the graph does not hold yet are compared one by
// one. Storage is in chunks that never move; links are atomics, so a search that meets a half-written list of
// links sees some old and some new neighbours, each of them a whole node.
//
// Of rows with one and the same vector, as phrases of one text have, the graph holds the first; the others hang on
// it in a chain. As nodes they would fill each other's links, and no way would lead out of them, or in.
#pragma once

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>

#include "kernels.h"
#include "search.h"

namespace bidmatch {

class LiveGraph {
   public:
    LiveGraph(size_t dim, size_t M, size_t ef_construction, uint64_t seed)
        : dim_(dim),
          M_(M),
          max_links0_(2 * M),
          ef_construction_(std::max(ef_construction, M)),
          level_scale_(1.0 / std::log(static_cast<double>(M))),
          random_(seed),
          dot_(kernels().dot) {
        if (dim == 0) throw std::invalid_argument("vectors need a width");
        if (M < 2 || M > 128) throw std::invalid_argument("M must lie in 2..128");
    }
    ~LiveGraph() {
        for (auto& chunk : chunks_) delete chunk.load();
    }
    LiveGraph(const LiveGraph&) = delete;
    LiveGraph& operator=(const LiveGraph&) = delete;

    size_t dim() const { return dim_; }
    size_t count() const { return count_.load(std::memory_order_acquire); }
    size_t linked() const { return linked_.load(std::memory_order_acquire); }

    // Adds n rows; those whose `searchable` is 0 are never found. Returns the number of the first.
    size_t append(const float* vectors, const uint8_t* searchable, size_t n) {
        std::lock_guard<std::mutex> lock(appending_);
        const size_t first = count_.load(std::memory_order_relaxed);
        if (first + n > kChunks * kChunkRows) throw std::length_error("there is no room for that many live rows");
        for (size_t i = 0; i < n; ++i) {
            const size_t row = first + i;
            Chunk* chunk = chunks_[row / kChunkRows].load(std::memory_order_relaxed);
            if (!chunk) {
                chunk = new Chunk(dim_, max_links0_);
                chunks_[row / kChunkRows].store(chunk, std::memory_order_release);
            }
            std::memcpy(chunk->vector(row % kChunkRows, dim_), vectors + i * dim_, dim_ * sizeof(float));
            chunk->searchable[row % kChunkRows] = searchable[i];
        }
        count_.store(first + n, std::memory_order_release);
        return first;
    }

    // Puts up to `most` rows that wait into the graph, in their order. One thread at a time; returns how many.
    size_t link(size_t most) {
        std::lock_guard<std::mutex> lock(linking_);
        size_t done = 0;
        for (; done < most; ++done) {
            const size_t row = linked_.load(std::memory_order_relaxed);
            if (row >= count()) break;
            if (chunk_of(row).searchable[row % kChunkRows]) insert(static_cast<uint32_t>(row));
            linked_.store(row + 1, std::memory_order_release);
        }
        return done;
    }

    void search(const float* query, size_t ef, const Rules& rules, Best& best) const {
        const size_t total = std::min<size_t>(count(), rules.limit);
        // Before the graph is searched: a row that is linked meanwhile is then compared here, not missed.
        const size_t waiting = linked();
        for (size_t row = waiting; row < total; ++row) {
            const Chunk& chunk = chunk_of(row);
            if (chunk.searchable[row % kChunkRows] && rules.admits(row))
                best.offer(dot_(query, chunk.vector(row % kChunkRows, dim_), dim_), static_cast<uint32_t>(row));
        }
        const uint64_t top = top_.load(std::memory_order_acquire);
        if (top == kNone) return;
        Scratch& own = scratch();
        own.visited.resize(count());
        own.candidates.clear();
        own.top.clear();
        uint32_t current = descend(query, top, 0);
        level_search(query, current, 0, ef, &rules, own);
        own.visited.clear();
        for (const Scored& found : own.top.items()) {
            if (best.full() && found.score < best.worst()) continue;
            some_row(found.node, [&](uint32_t row) {
                if (row < waiting && rules.admits(row)) best.offer(found.score, row);
                return false;
            });
        }
    }

    void exact(const float* query, const Rules& rules, Best& best) const {
        const size_t total = std::min<size_t>(count(), rules.limit);
        for (size_t row = 0; row < total; ++row) {
            const Chunk& chunk = chunk_of(row);
            if (chunk.searchable[row % kChunkRows] && rules.admits(row))
                best.offer(dot_(query, chunk.vector(row % kChunkRows, dim_), dim_), static_cast<uint32_t>(row));
        }
    }

    const float* vector(size_t row) const { return chunk_of(row).vector(row % kChunkRows, dim_); }

   private:
    static constexpr size_t kChunkRows = 1024;
    static constexpr size_t kChunks = 1 << 16;
    static constexpr uint64_t kNone = ~uint64_t(0);
    static constexpr int kMaxLevel = 16;
    static constexpr float kRounding = 1e-4f;
    static constexpr float kLeastScore = -std::numeric_limits<float>::infinity();

    using Link = std::atomic<uint32_t>;

    struct Chunk {
        Chunk(size_t dim, size_t max_links0)
            : vectors(new float[kChunkRows * dim]),
              links0(new Link[kChunkRows * (1 + max_links0)]()),
              upper(new std::unique_ptr<Link[]>[kChunkRows]),
              same(new Link[kChunkRows]()),
              searchable(new uint8_t[kChunkRows]()) {}
        float* vector(size_t at, size_t dim) const { return vectors.get() + at * dim; }
        std::unique_ptr<float[]> vectors;
        std::unique_ptr<Link[]> links0;
        std::unique_ptr<std::unique_ptr<Link[]>[]> upper;
        std::unique_ptr<Link[]> same;  // one more than the next row with the same vector; 0: none
        std::unique_ptr<uint8_t[]> searchable;
    };

    Chunk& chunk_of(size_t row) const { return *chunks_[row / kChunkRows].load(std::memory_order_acquire); }

    size_t most_links(int level) const { return level ? M_ : max_links0_; }

    // Number of links, then the links; null above the node's own level.
    Link* links(uint32_t node, int level) const {
        Chunk& chunk = chunk_of(node);
        if (level == 0) return chunk.links0.get() + size_t(node % kChunkRows) * (1 + max_links0_);
        Link* upper = chunk.upper[node % kChunkRows].get();
        if (!upper || level > static_cast<int>(upper[0].load(std::memory_order_relaxed))) return nullptr;
        return upper + 1 + size_t(level - 1) * (1 + M_);
    }

    static uint32_t top_node(uint64_t top) { return static_cast<uint32_t>(top >> 8); }
    static int top_level(uint64_t top) { return static_cast<int>(top & 0xff); }

    Link& same(uint32_t row) const { return chunk_of(row).same[row % kChunkRows]; }

    // Whether something holds of a node's row, or of another one with its vector.
    template <class Holds>
    bool some_row(uint32_t node, Holds holds) const {
        for (uint32_t next = node + 1; next; next = same(next - 1).load(std::memory_order_acquire))
            if (holds(next - 1)) return true;
        return false;
    }

    float score(const float* query, uint32_t node) const { return dot_(query, vector(node), dim_); }

    // From the top down to the level above `level`, each time to the nearest node.
    uint32_t descend(const float* query, uint64_t top, int level) const {
        uint32_t current = top_node(top);
        float best = score(query, current);
        for (int at = top_level(top); at > level; --at) {
            for (bool moved = true; moved;) {
                moved = false;
                const Link* list = links(current, at);
                if (!list) break;
                const uint32_t count = std::min<uint32_t>(list[0].load(std::memory_order_acquire), M_);
                for (uint32_t i = 1; i <= count; ++i)
                    prefetch_vector(vector(list[i].load(std::memory_order_acquire)), dim_);
                for (uint32_t i = 1; i <= count; ++i) {
                    const uint32_t other = list[i].load(std::memory_order_acquire);
                    const float found = score(query, other);
                    if (found > best) {
                        best = found;
                        current = other;
                        moved = true;
                    }
                }
            }
        }
        return current;
    }

    // The best `ef` nodes of a level into `own.top`, of those with a row that the rules admit, if there are any.
    void level_search(const float* query, uint32_t start, int level, size_t ef, const Rules* rules, Scratch& own) const {
        const bool ruled = rules && rules->any();
        const auto keep = [&](float found, uint32_t node) {
            if (ruled && !some_row(node, [&](uint32_t row) { return rules->admits(row); })) return;
            own.top.push({found, node});
            if (own.top.size() > ef) own.top.pop();
        };
        const float first = score(query, start);
        // The way down may have led to a row that was added since the search began.
        own.visited.resize(size_t(start) + 1);
        own.visited.visit(start);
        own.candidates.push({first, start});
        keep(first, start);
        while (!own.candidates.empty()) {
            const Scored nearest = own.candidates.front();
            if (own.top.size() >= ef && nearest.score < own.top.front().score) break;
            own.candidates.pop();
            const Link* list = links(nearest.node, level);
            if (!list) continue;
            const uint32_t count = std::min<uint32_t>(list[0].load(std::memory_order_acquire), most_links(level));
            uint32_t fresh[256];
            uint32_t found = 0;
            for (uint32_t i = 1; i <= count; ++i) {
                const uint32_t other = list[i].load(std::memory_order_acquire);
                // Rows added since the search began may lie beyond what it can mark as visited.
                if (!own.visited.holds(other) || !own.visited.visit(other)) continue;
                prefetch_vector(vector(other), dim_);
                fresh[found++] = other;
            }
            for (uint32_t i = 0; i < found; ++i) {
                const float other = score(query, fresh[i]);
                if (own.top.size() >= ef && !(other > own.top.front().score)) continue;
                own.candidates.push({other, fresh[i]});
                if (level == 0) prefetch(links(own.candidates.front().node, 0));
                keep(other, fresh[i]);
            }
        }
    }

    // HNSW's heuristic: of candidates, best first, those nearer to the node than to any that was taken already.
    void diverse(std::vector<Scored>& candidates, size_t most) const {
        if (candidates.size() < most) return;
        std::sort(candidates.begin(), candidates.end(),
                  [](const Scored& a, const Scored& b) { return a.score > b.score; });
        size_t taken = 0;
        for (size_t i = 0; i < candidates.size() && taken < most; ++i) {
            const Scored candidate = candidates[i];
            bool good = true;
            for (size_t j = 0; j < taken && good; ++j)
                good = score(vector(candidate.node), candidates[j].node) <= candidate.score;
            if (good) candidates[taken++] = candidate;
        }
        candidates.resize(taken);
    }

    static void write_links(Link* list, const std::vector<Scored>& nodes) {
        for (size_t i = 0; i < nodes.size(); ++i) list[1 + i].store(nodes[i].node, std::memory_order_release);
        list[0].store(static_cast<uint32_t>(nodes.size()), std::memory_order_release);
    }

    void make_upper(uint32_t row, int level) {
        if (!level) return;
        std::unique_ptr<Link[]> upper(new Link[1 + size_t(level) * (1 + M_)]());
        upper[0].store(static_cast<uint32_t>(level), std::memory_order_relaxed);
        chunk_of(row).upper[row % kChunkRows] = std::move(upper);
    }

    void insert(uint32_t row) {
        const float* own_vector = vector(row);
        std::uniform_real_distribution<double> uniform(0.0, 1.0);
        const double drawn = -std::log(1.0 - uniform(random_)) * level_scale_;
        const int level = static_cast<int>(std::min<double>(drawn, kMaxLevel));
        const uint64_t top = top_.load(std::memory_order_relaxed);
        if (top == kNone) {
            make_upper(row, level);
            top_.store(uint64_t(row) << 8 | uint64_t(level), std::memory_order_release);
            return;
        }
        Scratch& own = scratch();
        own.visited.resize(count());
        uint32_t start = descend(own_vector, top, level);
        const int highest = std::min(level, top_level(top));
        std::vector<std::vector<Scored>> neighbours(size_t(highest) + 1);
        for (int at = highest; at >= 0; --at) {
            own.candidates.clear();
            own.top.clear();
            level_search(own_vector, start, at, ef_construction_, nullptr, own);
            own.visited.clear();
            std::vector<Scored>& found = neighbours[size_t(at)];
            found = own.top.items();
            float nearest = kLeastScore;
            for (const Scored& one : found)
                if (one.score > nearest) {
                    nearest = one.score;
                    start = one.node;
                }
            for (const Scored& one : found)
                if (one.score >= nearest - kRounding &&
                    !std::memcmp(vector(one.node), own_vector, dim_ * sizeof(float))) {
                    same(row).store(same(one.node).load(std::memory_order_relaxed), std::memory_order_relaxed);
                    same(one.node).store(row + 1, std::memory_order_release);
                    return;
                }
            diverse(found, M_);
        }
        make_upper(row, level);
        for (int at = highest; at >= 0; --at) write_links(links(row, at), neighbours[size_t(at)]);
        // The way out of the new node is whole on every level before any way in leads to it.
        for (int at = highest; at >= 0; --at)
            for (const Scored& neighbour : neighbours[size_t(at)]) link_back(neighbour.node, row, at);
        if (level > top_level(top)) top_.store(uint64_t(row) << 8 | uint64_t(level), std::memory_order_release);
    }

    void link_back(uint32_t node, uint32_t row, int level) {
        Link* list = links(node, level);
        const size_t most = most_links(level);
        const uint32_t count = list[0].load(std::memory_order_relaxed);
        if (count < most) {
            list[1 + count].store(row, std::memory_order_release);
            list[0].store(count + 1, std::memory_order_release);
            return;
        }
        std::vector<Scored> all;
        all.reserve(count + 1);
        const float* from = vector(node);
        all.push_back({score(from, row), row});
        for (uint32_t i = 1; i <= count; ++i) {
            const uint32_t other = list[i].load(std::memory_order_relaxed);
            all.push_back({score(from, other), other});
        }
        diverse(all, most);
        write_links(list, all);
    }

    const size_t dim_, M_, max_links0_, ef_construction_;
    const double level_scale_;
    std::mt19937_64 random_;
    const Dot dot_;
    std::mutex appending_, linking_;
    std::atomic<Chunk*> chunks_[kChunks] = {};
    std::atomic<size_t> count_{0}, linked_{0};
    std::atomic<uint64_t> top_{kNone};
};

}  // namespace bidmatch
