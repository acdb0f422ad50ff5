// packing.h - which examples share a sequence: each goes, whole, where it leaves the least room.
#pragma once

#include <cassert>
#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

// Examples, sequence after sequence, and where in `order` each sequence ends. In a sequence they are in the
// order of their numbers.
struct Packing {
    std::vector<uint32_t> order;
    std::vector<size_t> ends;

    std::span<const uint32_t> sequence(size_t number) const {
        const size_t begin = number > 0 ? ends[number - 1] : 0;
        return std::span(order).subspan(begin, ends[number] - begin);
    }
};

// Packs examples of so many rows each, 1 to `room`, into sequences of `room` rows: best fit (Johnson 1974),
// one after the other; of sequences with equally little left the first. dev/reference.py does the same.
inline Packing pack(std::span<const uint32_t> lengths, uint32_t room) {
    std::set<std::pair<uint32_t, size_t>> open;  // the rows that are left, and the sequence
    std::vector<size_t> sequence_of;
    Packing packing;
    for (const uint32_t length : lengths) {
        assert(1 <= length && length <= room);
        const auto best = open.lower_bound({length, 0});
        std::pair<uint32_t, size_t> place{room, packing.ends.size()};
        if (best != open.end())
            place = *best, open.erase(best);
        else
            packing.ends.push_back(0);
        sequence_of.push_back(place.second);
        packing.ends[place.second]++;
        if (place.first > length) open.insert({place.first - length, place.second});
    }
    std::vector<size_t> next;  // the place in `order` of each sequence's next example
    size_t sum = 0;
    for (size_t& count : packing.ends) next.push_back(sum), count = sum += count;
    packing.order.resize(lengths.size());
    for (size_t i = 0; i < lengths.size(); i++)
        packing.order[next[sequence_of[i]]++] = static_cast<uint32_t>(i);
    return packing;
}

// Each of so many examples in a sequence of its own.
inline Packing each_apart(size_t count) {
    Packing packing;
    for (size_t i = 0; i < count; i++) {
        packing.order.push_back(static_cast<uint32_t>(i));
        packing.ends.push_back(i + 1);
    }
    return packing;
}
