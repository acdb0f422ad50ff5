// dataset.h - tokens from files, and the order in which training sees them: a pure function of seed and
// sequence number, so that a resumed run needs no position but that number.
//
// Two kinds of files. Token shards in llm.c's format: int32 header[256] = {20240520, 1, token count, ...},
// then that many uint16 tokens of GPT-2's vocabulary; each shard is one stream of tokens. Everything else is
// text, whose tokens are its bytes; all text files together are one stream. Files are mapped, never loaded.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <glob.h>
#include <sys/stat.h>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/random.h"

// The files that an option's patterns (file names, or glob(3) patterns) stand for, sorted by bytes within
// each pattern. Fails naming option and pattern when a pattern matches nothing, a directory or an empty file.
inline std::vector<std::string> expand_files(const std::vector<std::string>& patterns, const char* option) {
    std::vector<std::string> files;
    for (const std::string& pattern : patterns) {
        std::vector<std::string> matches;
        struct stat info;
        if (stat(pattern.c_str(), &info) == 0) {
            matches.push_back(pattern);  // as it stands, even if its name has brackets or stars
        } else {
            glob_t found;
            if (glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found) == 0)
                matches.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
            globfree(&found);
        }
        if (matches.empty()) fail("%s: no file matches \"%s\"", option, pattern.c_str());
        std::sort(matches.begin(), matches.end());
        for (const std::string& file : matches) {
            const std::string from = file == pattern ? "" : format(" (from \"%s\")", pattern.c_str());
            if (stat(file.c_str(), &info) != 0)
                fail("%s: %s%s: %s", option, file.c_str(), from.c_str(), std::strerror(errno));
            if (S_ISDIR(info.st_mode))
                fail("%s: %s%s is a directory; name the files in it, as in \"%s/*\"", option, file.c_str(),
                     from.c_str(), file.c_str());
            if (!S_ISREG(info.st_mode))
                fail("%s: %s%s is not a regular file", option, file.c_str(), from.c_str());
            if (info.st_size == 0) fail("%s: %s%s is empty", option, file.c_str(), from.c_str());
        }
        files.insert(files.end(), matches.begin(), matches.end());
    }
    return files;
}

// The index of the first token that is not below `limit`, or `count`.
template <class Token>
uint64_t find_token_outside(const Token* tokens, uint64_t count, uint32_t limit) {
    if (limit > std::numeric_limits<Token>::max()) return count;
    constexpr uint64_t kBlock =
        4096;  // the inner loop has no way out, so that it becomes vector instructions
    for (uint64_t first = 0; first < count; first += kBlock) {
        const uint64_t end = std::min(count, first + kBlock);
        Token largest = 0;
        for (uint64_t i = first; i < end; i++) largest = std::max(largest, tokens[i]);
        if (largest >= limit)
            return std::find_if(tokens + first, tokens + end, [&](Token t) { return t >= limit; }) - tokens;
    }
    return count;
}

// Which part of each text file: its last tenth (rounded down) is for validation.
enum class Part { All, Train, Validation };

// The token streams of one option's files.
class Dataset {
  public:
    // `files` as from expand_files. Fails on a damaged shard, and when text and shards are mixed. Shards are
    // whole files for training or for validation: Part::Train takes all of them and Part::Validation fails.
    Dataset(const std::vector<std::string>& files, const char* option, Part part = Part::All)
        : option_(option) {
        assert(!files.empty());
        for (const std::string& path : files) files_.emplace_back(path);
        is_text_ = !is_shard(files_[0]);
        limit_ = static_cast<uint32_t>(vocabulary());
        for (const MappedFile& file : files_) {
            if (is_shard(file) == is_text_)
                fail("%s: %s and %s are text and token shard; give files of one kind", option,
                     files[0].c_str(), file.path().c_str());
            if (is_text_)
                add_text(file, part);
            else
                add_shard(file);
        }
        if (!is_text_ && part == Part::Validation)
            fail("%s: %s is a token shard, which is not split; give shards for validation too", option,
                 files[0].c_str());
    }

    bool is_text() const { return is_text_; }
    // How many different tokens this kind of files can have by its definition.
    int vocabulary() const { return is_text_ ? 256 : 50257; }
    const std::string& option() const { return option_; }

    size_t stream_count() const { return streams_.size(); }
    uint64_t token_count(size_t stream) const { return streams_[stream].tokens; }
    uint64_t token_count() const {
        uint64_t sum = 0;
        for (const Stream& stream : streams_) sum += stream.tokens;
        return sum;
    }
    // Whether a file is one of the data's.
    bool reads(const std::string& path) const {
        return std::any_of(files_.begin(), files_.end(), [&](const MappedFile& file) {
            std::error_code none;
            return std::filesystem::equivalent(file.path(), path, none);
        });
    }
    // What to call a stream in a message: its file, or the first of them.
    std::string stream_name(size_t stream) const {
        if (!is_text_ || files_.size() == 1) return files_[stream].path();
        return format("%s and %zu more", files_[0].path().c_str(), files_.size() - 1);
    }

    // From here on tokens must be below `vocab`, the model's. Looks at the first 512 Mi tokens now, a second
    // or so of work, at the others when they are read. Fails naming the shard, the position and the token.
    void check_tokens(int vocab) {
        assert(vocab > 0);
        limit_ = static_cast<uint32_t>(vocab);
        uint64_t budget = uint64_t{512} << 20;
        for (const Stream& stream : streams_) {
            for (const Piece& piece : stream.pieces) {
                const uint64_t count = std::min(piece.count, budget);
                check(piece, 0, count);
                budget -= count;
            }
        }
    }

    void expect_random_reads() const {
        for (const MappedFile& file : files_) file.expect_random_reads();
    }

    // Copies tokens [first, first + count) of a stream; fails as check_tokens does.
    void read(size_t stream, uint64_t first, uint64_t count, int32_t* out) const {
        const std::vector<Piece>& pieces = streams_[stream].pieces;
        assert(first + count <= streams_[stream].tokens);
        auto piece = std::upper_bound(pieces.begin(), pieces.end(), first,
                                      [](uint64_t position, const Piece& p) { return position < p.first; });
        for (--piece; count > 0; ++piece) {
            const uint64_t skip = first - piece->first, n = std::min(count, piece->count - skip);
            check(*piece, skip, n);
            if (is_text_)
                std::copy_n(piece->data + skip, n, out);
            else
                std::copy_n(shard_tokens(*piece) + skip, n, out);
            out += n;
            first += n;
            count -= n;
        }
    }

  private:
    static constexpr int32_t kMagic = 20240520, kVersion = 1;
    static constexpr size_t kHeaderBytes = 256 * sizeof(int32_t);

    // Tokens that lie together in one file.
    struct Piece {
        const MappedFile* file;
        uint64_t file_position;     // of its first token, in tokens after the header
        const unsigned char* data;  // of its first token
        uint64_t first, count;      // where it lies in the stream
    };
    struct Stream {
        std::vector<Piece> pieces;  // none empty
        uint64_t tokens = 0;
    };

    static const uint16_t* shard_tokens(const Piece& piece) {
        return reinterpret_cast<const uint16_t*>(piece.data);  // 1024 bytes into a page
    }

    static bool is_shard(const MappedFile& file) {
        int32_t magic = 0;
        if (file.size() >= sizeof magic) std::memcpy(&magic, file.data(), sizeof magic);
        return magic == kMagic || file.path().ends_with(".bin");
    }

    void add_shard(const MappedFile& file) {
        const char* path = file.path().c_str();
        if (file.size() < kHeaderBytes)
            fail("%s: %zu bytes are too few for a token shard, whose header alone has %zu", path, file.size(),
                 kHeaderBytes);
        int32_t header[3];
        std::memcpy(header, file.data(), sizeof header);
        if (header[0] != kMagic)
            fail("%s: is not a token shard: it starts with %d where %d belongs", path, header[0], kMagic);
        if (header[1] != kVersion)
            fail("%s: token shard of version %d where %d is needed", path, header[1], kVersion);
        const size_t bytes = file.size() - kHeaderBytes;
        if (header[2] < 1 || bytes != sizeof(uint16_t) * static_cast<size_t>(header[2]))
            fail("%s: its header promises %d tokens of 2 bytes and %zu bytes follow", path, header[2], bytes);
        const auto count = static_cast<uint64_t>(header[2]);
        streams_.push_back({{Piece{&file, 0, file.data() + kHeaderBytes, 0, count}}, count});
    }

    void add_text(const MappedFile& file, Part part) {
        if (streams_.empty()) streams_.emplace_back();
        Stream& stream = streams_[0];
        const uint64_t held_out = part == Part::All ? 0 : file.size() / 10;
        const uint64_t begin = part == Part::Validation ? file.size() - held_out : 0;
        const uint64_t count = part == Part::Validation ? held_out : file.size() - held_out;
        if (count == 0) return;
        stream.pieces.push_back({&file, begin, file.data() + begin, stream.tokens, count});
        stream.tokens += count;
    }

    void check(const Piece& piece, uint64_t first, uint64_t count) const {
        const uint64_t bad =
            first + (is_text_ ? find_token_outside(piece.data + first, count, limit_)
                              : find_token_outside(shard_tokens(piece) + first, count, limit_));
        if (bad == first + count) return;
        fail("%s: token %d at position %llu is not below the vocabulary size %u", piece.file->path().c_str(),
             is_text_ ? piece.data[bad] : shard_tokens(piece)[bad],
             static_cast<unsigned long long>(piece.file_position + bad), limit_);
    }

    std::string option_;
    std::vector<MappedFile> files_;
    std::vector<Stream> streams_;
    bool is_text_ = false;
    uint32_t limit_ = 0;
};

// Deals a dataset out as sequences of T inputs and their T targets (the inputs' successors), numbered through
// all epochs. dev/reference.py computes the same order:
//
//   A stream of n >= T + 1 tokens has max(1, (n - T) / T) windows; S sequences, the sum of windows, are an
//   epoch. Sequence q is number q % S of epoch e = q / S, counted through the streams in the epoch's order of
//   streams and through each stream f in the epoch's order of its windows. Window w starts at token offset +
//   w * T. Shuffled: streams are sorted by random_bits(seed, e, 0, f), windows by random_bits(seed, e, f + 1,
//   w), and offset is random_bits(seed, e, f + 1, 2^63) % T, or 0 if n < 2 T. Not shuffled: as given, and
//   offset is 0.
class SequenceLoader {
  public:
    // The dataset must stay in place while the loader lives. Fails when a stream is shorter than T + 1
    // tokens.
    SequenceLoader(const Dataset& data, int seq_len, uint64_t seed, bool shuffle)
        : data_(data), seq_len_(static_cast<uint64_t>(seq_len)), seed_(seed), shuffle_(shuffle) {
        assert(seq_len >= 1);
        for (size_t stream = 0; stream < data.stream_count(); stream++) {
            const uint64_t tokens = data.token_count(stream);
            if (tokens < seq_len_ + 1)
                fail(
                    "%s: %s has %llu tokens, and sequences of %d need %d; use longer files or shorter "
                    "sequences",
                    data.option().c_str(), data.stream_name(stream).c_str(),
                    static_cast<unsigned long long>(tokens), seq_len, seq_len + 1);
            sequences_per_epoch_ += windows(stream);
        }
        if (shuffle) data.expect_random_reads();
    }

    uint64_t sequences_per_epoch() const { return sequences_per_epoch_; }

    // Writes sequences first_sequence ... + rows - 1 to inputs (rows, T) and targets (rows, T). What it
    // writes depends on nothing but its arguments. Fails on a token outside the vocabulary.
    void fill(uint64_t first_sequence, int rows, int32_t* inputs, int32_t* targets) {
        for (int row = 0; row < rows; row++, inputs += seq_len_, targets += seq_len_) {
            const uint64_t sequence = first_sequence + static_cast<uint64_t>(row);
            enter_epoch(sequence / sequences_per_epoch_);
            const uint64_t number = sequence % sequences_per_epoch_;
            const auto turn = std::upper_bound(ends_.begin(), ends_.end(), number) - ends_.begin();
            const size_t stream = order_[turn];
            enter_stream(stream);
            const uint64_t place = number - (ends_[turn] - windows(stream));
            const uint64_t start = offset_ + (shuffle_ ? window_order_[place] : place) * seq_len_;
            data_.read(stream, start, seq_len_, inputs);
            std::copy_n(inputs + 1, seq_len_ - 1, targets);
            data_.read(stream, start + seq_len_, 1, targets + seq_len_ - 1);
        }
    }

  private:
    static constexpr uint64_t kNone = ~uint64_t{0};

    uint64_t windows(size_t stream) const {
        return std::max<uint64_t>(1, (data_.token_count(stream) - seq_len_) / seq_len_);
    }

    // 0 ... count - 1, sorted by their random numbers of this group and epoch; equal ones stay in order.
    std::vector<uint64_t> shuffled(uint64_t count, uint64_t group) const {
        std::vector<std::pair<uint64_t, uint64_t>> keyed(count);
        for (uint64_t i = 0; i < count; i++) keyed[i] = {random_bits(seed_, epoch_, group, i), i};
        std::sort(keyed.begin(), keyed.end());
        std::vector<uint64_t> order(count);
        for (uint64_t i = 0; i < count; i++) order[i] = keyed[i].second;
        return order;
    }

    void enter_epoch(uint64_t epoch) {
        if (epoch == epoch_) return;
        epoch_ = epoch;
        stream_ = kNone;
        order_.resize(data_.stream_count());
        std::iota(order_.begin(), order_.end(), 0);
        if (shuffle_) order_ = shuffled(order_.size(), 0);
        ends_.clear();
        uint64_t end = 0;
        for (const uint64_t stream : order_) ends_.push_back(end += windows(stream));
    }

    void enter_stream(uint64_t stream) {
        if (stream == stream_) return;
        stream_ = stream;
        if (!shuffle_) return;
        window_order_ = shuffled(windows(stream), stream + 1);
        const bool room = data_.token_count(stream) >= 2 * seq_len_;
        offset_ = room ? random_bits(seed_, epoch_, stream + 1, uint64_t{1} << 63) % seq_len_ : 0;
    }

    const Dataset& data_;
    const uint64_t seq_len_, seed_;
    const bool shuffle_;
    uint64_t sequences_per_epoch_ = 0;
    // A cache of the order around the last sequence that was asked for.
    uint64_t epoch_ = kNone, stream_ = kNone, offset_ = 0;
    std::vector<uint64_t> order_,
        ends_;  // the epoch's streams, and the sequence number at which each one ends
    std::vector<uint64_t> window_order_;  // of stream_
};
