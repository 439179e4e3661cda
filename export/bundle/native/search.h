// What a search keeps while it runs, and which rows it may return.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace bidmatch {

struct Scored {
    float score;
    uint32_t node;
};

// A heap's front is its worst element here, so that what is beaten leaves first.
struct BestFirst {
    bool operator()(const Scored& a, const Scored& b) const { return a.score < b.score; }
};
struct WorstFirst {
    bool operator()(const Scored& a, const Scored& b) const { return a.score > b.score; }
};

template <class Order>
class Heap {
   public:
    void clear() { items_.clear(); }
    bool empty() const { return items_.empty(); }
    size_t size() const { return items_.size(); }
    const Scored& front() const { return items_.front(); }
    void push(Scored item) {
        items_.push_back(item);
        std::push_heap(items_.begin(), items_.end(), Order());
    }
    void pop() {
        std::pop_heap(items_.begin(), items_.end(), Order());
        items_.pop_back();
    }
    std::vector<Scored>& items() { return items_; }

   private:
    std::vector<Scored> items_;
};

// A bit a node, cleared by undoing what was set: an eighth of a byte a node a thread, and it stays in the cache.
class Visited {
   public:
    void resize(size_t nodes) {
        if (bits_.size() * 64 < nodes) bits_.resize(nodes / 64 + 1, 0);
    }
    bool holds(uint32_t node) const { return node < bits_.size() * 64; }
    // Whether it is the node's first visit.
    bool visit(uint32_t node) {
        uint64_t& word = bits_[node >> 6];
        const uint64_t bit = uint64_t(1) << (node & 63);
        if (word & bit) return false;
        if (word == 0) touched_.push_back(node >> 6);
        word |= bit;
        return true;
    }
    void clear() {
        for (uint32_t word : touched_) bits_[word] = 0;
        touched_.clear();
    }

   private:
    std::vector<uint64_t> bits_;
    std::vector<uint32_t> touched_;
};

// Memory that a thread keeps from search to search.
struct Scratch {
    Visited visited;
    Heap<BestFirst> candidates;
    Heap<WorstFirst> top;
    std::vector<int16_t> coded;  // the query
};

inline Scratch& scratch() {
    thread_local Scratch mine;
    return mine;
}

// Which rows a search may return. All pointers may be null; `allowed` and `off` hold a bit a row.
struct Rules {
    const uint8_t* allowed = nullptr;  // set: may be returned
    const uint8_t* off = nullptr;      // set: may not be returned
    uint64_t limit = std::numeric_limits<uint64_t>::max();  // rows from here on may not be returned
    const int32_t* denied = nullptr;   // sorted rows that may not be returned
    size_t denied_count = 0;

    bool any() const { return allowed || off || denied_count || limit != std::numeric_limits<uint64_t>::max(); }
    bool admits(uint64_t row) const {
        if (row >= limit) return false;
        if (allowed && !(allowed[row >> 3] >> (row & 7) & 1)) return false;
        if (off && (off[row >> 3] >> (row & 7) & 1)) return false;
        return !denied_count || !std::binary_search(denied, denied + denied_count, static_cast<int32_t>(row));
    }
};

// The k best of what is offered; of equal scores the lesser row.
class Best {
   public:
    explicit Best(size_t k) : k_(k) { items_.reserve(std::min<size_t>(k, 4096)); }
    bool full() const { return items_.size() == k_; }
    float worst() const { return full() ? items_.front().score : -std::numeric_limits<float>::infinity(); }
    void offer(float score, uint32_t row) {
        const Scored item{score, row};
        if (!full()) {
            items_.push_back(item);
            std::push_heap(items_.begin(), items_.end(), better);
        } else if (k_ && better(item, items_.front())) {
            std::pop_heap(items_.begin(), items_.end(), better);
            items_.back() = item;
            std::push_heap(items_.begin(), items_.end(), better);
        }
    }
    std::vector<Scored>& sorted() {
        std::sort(items_.begin(), items_.end(), better);
        return items_;
    }

   private:
    static bool better(const Scored& a, const Scored& b) {
        return a.score > b.score || (a.score == b.score && a.node < b.node);
    }
    size_t k_;
    std::vector<Scored> items_;
};

}  // namespace bidmatch
