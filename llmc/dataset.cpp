// dataset.cpp - opens and reads a run's data, packs its examples, and deals out sequences.
#include "llmc/dataset.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <utility>

#include <glob.h>
#include <sys/stat.h>

#include "llmc/data_files.h"
#include "llmc/random.h"
#include "llmc/temporary_file.h"

// A kind of token shard: int32 header[256] = {magic, version, token count, ...}, followed by the tokens.
struct ShardFormat {
    int32_t magic, version;
    size_t token_bytes;
    uint32_t limit;  // all tokens are below it
    const char* name;
};
static constexpr ShardFormat kShardFormats[] = {
    {20240520, 1, 2, 1u << 16, "16-bit token shard"},
    {20240801, 7, 4, 1u << 31, "32-bit token shard"},
};

static constexpr size_t kHeaderBytes = 256 * sizeof(int32_t);
static constexpr uint32_t kEveryNumber = ~uint32_t{0};  // a limit that tokens marked by without_loss()
                                                        // pass too

static constexpr size_t kExampleTokenBytes = 4;  // wide enough for without_loss()

// The tokens of all text files, one file after the other.
struct Dataset::TextTokens {
    TemporaryFile file;
    const size_t token_bytes;
    uint64_t count = 0;

    TextTokens(std::string what, uint32_t limit)
        : file(std::move(what)), token_bytes(limit <= 1u << 16 ? 2 : 4) {}
    void append(std::span<const int32_t> tokens) {
        for (const int32_t token : tokens) {
            const auto narrow = static_cast<uint16_t>(token);
            file.append(token_bytes == 2 ? static_cast<const void*>(&narrow) : &token, token_bytes);
        }
        count += tokens.size();
    }
};

// Where each example's tokens are among the tokens of all files, when they were tokenized for sequences
// of seq_len, and the fewest rows that an example takes.
struct Dataset::ExampleIndex {
    RecordFile<Example> examples;
    const int seq_len;
    uint32_t shortest = UINT32_MAX;

    ExampleIndex(std::string what, int length) : examples(std::move(what)), seq_len(length) {}
};

template <class Token>
static void widen(const unsigned char* bytes, size_t count, int32_t* out) {
    for (size_t i = 0; i < count; i++) {
        Token token;
        std::memcpy(&token, bytes + i * sizeof token, sizeof token);
        out[i] = static_cast<int32_t>(token);
    }
}

// The number of tokens in a shard of `size` bytes; fails if it is damaged.
static uint64_t check_shard(const std::string& file, uint64_t size, const int32_t* header,
                            const ShardFormat* format) {
    const char* path = file.c_str();
    if (size < kHeaderBytes)
        fail("%s: %lu bytes are too few for a token shard, whose header alone has %zu", path, size,
             kHeaderBytes);
    if (!format)
        fail("%s is not a token shard: it starts with %d where %d or %d belongs", path, header[0],
             kShardFormats[0].magic, kShardFormats[1].magic);
    if (header[1] != format->version)
        fail("%s: %s of version %d where %d is needed", path, format->name, header[1], format->version);
    if (header[2] < 1 || size - kHeaderBytes != format->token_bytes * static_cast<uint64_t>(header[2]))
        fail("%s: its header promises %d tokens of %zu bytes and %lu bytes follow", path, header[2],
             format->token_bytes, size - kHeaderBytes);
    return static_cast<uint64_t>(header[2]);
}

std::vector<std::string> expand_files(const std::vector<std::string>& patterns, const char* option) {
    std::vector<std::string> files;
    for (const std::string& pattern : patterns) {
        std::vector<std::string> matches;
        struct stat info;
        if (stat(pattern.c_str(), &info) == 0) {
            matches.push_back(pattern);  // taken literally, even if the name has brackets or stars
        } else {
            glob_t found;
            if (glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found) == 0)
                matches.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
            globfree(&found);
        }
        if (matches.empty()) fail("%s: no file matches \"%s\"", option, pattern);
        std::ranges::sort(matches);
        for (const std::string& file : matches) {
            const std::string from = file == pattern ? "" : format(" (from \"%s\")", pattern);
            if (stat(file.c_str(), &info) != 0)
                fail("%s: %s%s: %s", option, file, from, std::strerror(errno));
            if (S_ISDIR(info.st_mode))
                fail("%s: %s%s is a directory; name the files in it, as in \"%s/*\"", option, file, from,
                     file);
            if (!S_ISREG(info.st_mode)) fail("%s: %s%s is not a regular file", option, file, from);
            if (info.st_size == 0) fail("%s: %s%s is empty", option, file, from);
        }
        files.insert(files.end(), matches.begin(), matches.end());
    }
    return files;
}

void Dataset::for_each_example(const std::function<void(const Example&)>& use) const {
    for (const File& file : files_) index_->examples.for_each(file.first_example, file.examples, use);
    index_->examples.drop_pages();
}

std::string Dataset::longer_length(int seq_len, int most) const {
    if (knows_longest_ && longest_ <= static_cast<size_t>(most) + 1)
        return format("; --seq-len %zu cuts none", longest_ - 1);
    return seq_len < most ? format("; --seq-len %d, all that the model has, cuts fewer", most)
                          : "; the model has no longer ones";
}

bool Dataset::reads(const std::string& path) const {
    struct stat info;
    return stat(path.c_str(), &info) == 0 && std::ranges::any_of(files_, [&](const File& file) {
               return file.stamp.device == info.st_dev && file.stamp.inode == info.st_ino;
           });
}

std::string Dataset::stream_name(size_t stream) const {
    if (!is_text() || files_.size() == 1) return files_[stream].path;
    return format("%s and %zu more", files_[0].path, files_.size() - 1);
}

std::vector<std::string> Dataset::paths() const {
    std::vector<std::string> all;
    for (const File& file : files_)
        if (std::ranges::find(all, file.path) == all.end()) all.push_back(file.path);
    return all;
}

void Dataset::tokenize(uint32_t limit,
                       const std::function<void(const FileReader& file, const PutTokens& put)>& encode) {
    assert(is_bytes());
    const auto kept = std::make_shared<TextTokens>("the tokens of " + stream_name(0), limit);
    std::vector<File> files = std::move(files_);
    files_.clear();
    tokens_ = 0;
    for (File& file : files) {
        const FileReader& text = open_unchanged(file);
        const auto content = file.is_unpacked ? nullptr : unpacked(text);  // one file at a time: may be many
        const uint64_t begin = kept->count;
        encode(content ? *content : text, [&](std::span<const int32_t> tokens) { kept->append(tokens); });
        open_unchanged(file).drop_pages();
        append({std::move(file.path), file.stamp, begin, kept->count - begin});
    }
    kept->file.finish();
    text_tokens_ = kept;
    limit_ = limit;
}

void Dataset::read(const Example& example, std::vector<int32_t>& tokens) const {
    tokens.resize(example.count);
    static_assert(sizeof(int32_t) == kExampleTokenBytes);
    try {
        text_tokens_->file.read(example.begin * kExampleTokenBytes, example.count * kExampleTokenBytes,
                                tokens.data());
    } catch (const UserError& error) {
        throw DataError(error.what());
    }
}

void Dataset::read(size_t stream, uint64_t first, uint64_t count, int32_t* out) const {
    assert(first + count <= token_count(stream));
    auto file = files_.begin() + static_cast<ptrdiff_t>(stream);
    if (is_text())
        file = std::upper_bound(files_.begin(), files_.end(), first,
                                [](uint64_t token, const File& f) { return token < f.first; }) -
               1;
    try {
        for (; count > 0; ++file) {
            const uint64_t skip = first - file->first, n = std::min(count, file->count - skip);
            read_file(*file, skip, n, out);
            out += n;
            first += n;
            count -= n;
        }
    } catch (const UserError& error) {
        throw DataError(error.what());
    }
}

void Dataset::tokenize_examples(
    int seq_len, int most_len,
    const std::function<void(const FileReader& file, const PutExample& put)>& encode) {
    assert(is_examples() && !index_);
    const size_t most = static_cast<size_t>(seq_len) + 1;
    uint64_t begin = 0, with_loss = 0;
    index_ = std::make_shared<ExampleIndex>("the examples of " + stream_name(0), seq_len);
    std::vector<uint64_t> ends;  // of each file's examples
    tokenize(kEveryNumber, [&](const FileReader& file, const auto& put) {
        const auto add = [&](std::span<const int32_t> tokens) {
            const auto learnt = std::count_if(tokens.begin() + 1, tokens.end(), [](int t) { return t >= 0; });
            const auto count = static_cast<uint32_t>(tokens.size());
            index_->examples.append({begin, count, static_cast<uint32_t>(learnt)});
            index_->shortest = std::min(index_->shortest, count - 1);
            begin += count;
            with_loss += static_cast<uint64_t>(learnt);
            put(tokens);
        };
        std::vector<int32_t> rest;  // of the current text, not yet in an example
        bool parted = false;
        encode(file, [&](std::span<const int32_t> tokens, bool is_text, bool last, size_t length) {
            if (!is_text) {
                if (tokens.size() > most) {
                    cut_++;
                    knows_longest_ = knows_longest_ && length > 0;
                }
                longest_ = std::max({longest_, tokens.size(), length});
                return add(tokens.subspan(0, std::min(most, tokens.size())));
            }
            rest.insert(rest.end(), tokens.begin(), tokens.end());
            std::span<const int32_t> left(rest);
            for (; left.size() > most; left = left.subspan(most - 1)) {
                add(left.first(most));
                if (!std::exchange(parted, true)) parted_++;
            }
            if (last) {
                add(left);
                left = {};
                parted = false;
            }
            rest.erase(rest.begin(), rest.end() - static_cast<ptrdiff_t>(left.size()));
        });
        ends.push_back(index_->examples.count());
    });
    assert(token_bytes() == kExampleTokenBytes);
    index_->examples.finish();
    for (size_t i = 0; i < files_.size(); i++) {
        files_[i].first_example = i > 0 ? ends[i - 1] : 0;
        files_[i].examples = ends[i] - files_[i].first_example;
    }
    if (example_count() == 0) fail("%s: %s has no example", option_, stream_name(0));
    if (with_loss == 0)
        fail("%s: %s: no token of %lu examples is to be learnt in sequences of %d%s", option_, stream_name(0),
             example_count(), seq_len,
             cut_ == 0 ? "" : (": what comes later is cut off" + longer_length(seq_len, most_len)));
}

const PackedExamples& Dataset::packed() const {
    if (!packed_)
        packed_ = std::make_shared<const PackedExamples>(
            "the examples of " + stream_name(0), static_cast<uint32_t>(index_->seq_len), index_->shortest,
            apart_, [&](const auto& use) { for_each_example(use); });
    return *packed_;
}

std::unique_ptr<Dataset> Dataset::hold_out(uint64_t least) {
    assert(is_text());
    std::vector<Tenth> cuts;
    uint64_t held_out = 0, learnt = 0;
    for (const File& file : files_) {
        cuts.push_back(last_tenth(file, learnt));
        held_out += cuts.back().tokens;
    }
    if (held_out < least || (lines_ && learnt == 0)) return nullptr;
    auto tenths = std::unique_ptr<Dataset>(new Dataset(option_));
    tenths->text_tokens_ = text_tokens_;
    tenths->index_ = index_;
    tenths->texts_ = texts_;
    tenths->limit_ = limit_;
    tenths->lines_ = lines_;
    tenths->apart_ = apart_;
    const std::vector<File> files = std::exchange(files_, {});
    packed_.reset();
    tokens_ = 0;
    for (size_t i = 0; i < files.size(); i++) {
        File rest = files[i], tenth = files[i];
        rest.count -= cuts[i].tokens;
        rest.examples -= cuts[i].examples;
        tenth.begin += rest.count;
        tenth.count = cuts[i].tokens;
        tenth.first_example += rest.examples;
        tenth.examples = cuts[i].examples;
        if (tenth.count > 0) tenths->append(std::move(tenth));
        append(std::move(rest));
    }
    return tenths;
}

void Dataset::check_tokens(int vocab) {
    assert(vocab > 0);
    limit_ = static_cast<uint32_t>(vocab);
    if (token_bytes() < sizeof limit_ && limit_ >= 1u << (8 * token_bytes())) return;
    read_first_tokens([](std::span<const int32_t>) {});
}

int32_t Dataset::largest_token() const {
    int32_t largest = 0;
    read_first_tokens([&](std::span<const int32_t> tokens) {
        for (const int32_t token : tokens) largest = std::max(largest, token);
    });
    return largest;
}

void Dataset::drop_pages() const {
    if (open_) open_->drop_pages();
    if (text_tokens_) text_tokens_->file.drop_pages();
    if (packed_) packed_->drop_pages();
}

size_t Dataset::token_bytes() const {
    return format_ ? format_->token_bytes : text_tokens_ ? text_tokens_->token_bytes : 1;
}

void Dataset::read_first_tokens(const std::function<void(std::span<const int32_t>)>& use) const {
    uint64_t budget = uint64_t{512} << 20;
    std::vector<int32_t> chunk(1 << 16);
    for (const File& file : files_) {
        const uint64_t end = std::min(file.count, budget);
        for (uint64_t at = 0; at < end; at += chunk.size()) {
            const auto count = static_cast<size_t>(std::min<uint64_t>(chunk.size(), end - at));
            read_file(file, at, count, chunk.data());
            use(std::span<const int32_t>(chunk).first(count));
        }
        budget -= end;
    }
    drop_pages();
}

Dataset::Tenth Dataset::last_tenth(const File& file, uint64_t& learnt) const {
    if (!lines_) return {file.count / 10, 0};
    Tenth tenth{0, file.examples / 10};
    index_->examples.for_each(file.first_example + file.examples - tenth.examples, tenth.examples,
                              [&](const Example& e) {
                                  tenth.tokens += e.count;
                                  learnt += e.with_loss;
                              });
    return tenth;
}

void Dataset::append(File file) {
    file.first = is_text() ? tokens_ : 0;
    tokens_ += file.count;
    files_.push_back(std::move(file));
}

void Dataset::add(const std::string& path) {
    const FileReader file(path);
    const FileStamp stamp = file.stamp();
    int32_t header[3] = {};
    file.read(0, std::min(file.size(), sizeof header), header);
    const ShardFormat* format = nullptr;
    for (const ShardFormat& known : kShardFormats)
        if (header[0] == known.magic) format = &known;
    if (format) file.drop_pages();  // with what the system read ahead; a text is read whole anyway
    uint64_t count = stamp.bytes;
    if (format || path.ends_with(".bin")) count = check_shard(path, stamp.bytes, header, format);
    const bool lines = !format && data_kind(file) != DataKind::Text;
    const bool compressed = !format && is_gzip(file);
    if (compressed && name_extension(path) == "bin")
        fail("%s is a compressed token shard: unpack it first", path);
    if (lines && compressed) has_compressed_examples_ = true;
    if (files_.empty()) format_ = format, lines_ = lines;
    const auto kind = [](const ShardFormat* f, bool is_lines) {
        return f ? f->name : is_lines ? "file of examples in JSON" : "text";
    };
    if (format != format_ || lines != lines_)
        fail("%s: %s is a %s and %s a %s; give files of one kind", option_, files_[0].path,
             kind(format_, lines_), path, kind(format, lines));
    limit_ = format ? format->limit : 256;
    File added = {path, stamp, 0, count};
    if (compressed && !lines) {
        if (!texts_) texts_ = std::make_shared<TemporaryFile>("what " + path + " contains");
        added.is_unpacked = true;
        added.texts_begin = texts_bytes_;
        added.count = unpack(file, *texts_);
        texts_bytes_ += added.count;
    }
    append(std::move(added));
}

const FileReader& Dataset::open_unchanged(const File& file) const {
    if (!open_ || open_->path() != file.path) {
        if (open_) open_->drop_pages();
        open_ = file.is_unpacked ? texts_->part(file.path, file.texts_begin, file.count)
                                 : std::make_unique<const FileReader>(file.path, Pages::Dropped);
    }
    if (file.is_unpacked) return *open_;
    if (open_->stamp() != file.stamp)
        fail("%s was written to or replaced since the run began, and had %lu bytes then", file.path,
             file.stamp.bytes);
    return *open_;
}

void Dataset::read_file(const File& file, uint64_t first, uint64_t count, int32_t* out) const {
    const FileReader* input = text_tokens_ ? nullptr : &open_unchanged(file);
    unsigned char bytes[1 << 14];
    const size_t width = token_bytes(), header = is_text() ? 0 : kHeaderBytes;
    for (uint64_t n; count > 0; first += n, out += n, count -= n) {
        n = std::min<uint64_t>(count, sizeof bytes / width);
        const uint64_t at = header + (file.begin + first) * width;
        try {
            input ? input->read(at, n * width, bytes) : text_tokens_->file.read(at, n * width, bytes);
        } catch (const UserError&) {
            if (input) open_unchanged(file);  // fails if the file has changed
            throw;
        }
        if (width == 1) widen<uint8_t>(bytes, n, out);
        if (width == 2) widen<uint16_t>(bytes, n, out);
        if (width == 4) widen<uint32_t>(bytes, n, out);
        check(file, first, n, out);
    }
}

void Dataset::check(const File& file, uint64_t first, uint64_t count, const int32_t* tokens) const {
    uint32_t largest = 0;  // a loop without an early exit can be vectorized
    for (uint64_t i = 0; i < count; i++) largest = std::max(largest, static_cast<uint32_t>(tokens[i]));
    if (largest < limit_) return;
    const auto outside = [&](int32_t token) { return static_cast<uint32_t>(token) >= limit_; };
    const int32_t* bad = std::find_if(tokens, tokens + count, outside);
    const auto position = file.begin + first + static_cast<uint64_t>(bad - tokens);
    fail("%s: token %u at position %lu is not below the vocabulary size %u", file.path,
         static_cast<uint32_t>(*bad), position, limit_);
}

SequenceLoader::SequenceLoader(const Dataset& data, int seq_len, uint64_t seed, bool shuffle)
    : data_(data), seq_len_(static_cast<uint64_t>(seq_len)), seed_(seed), shuffle_(shuffle) {
    assert(seq_len >= 1);
    if (data.is_examples()) {
        sequences_per_epoch_ = data.packed().sequences();
        return;
    }
    for (size_t stream = 0; stream < data.stream_count(); stream++) {
        const uint64_t tokens = data.token_count(stream);
        if (tokens < seq_len_ + 1)
            fail(
                "%s: %s has %lu tokens, and sequences of %d need %d; use longer files or shorter "
                "sequences",
                data.option(), data.stream_name(stream), tokens, seq_len, seq_len + 1);
        sequences_per_epoch_ += windows(stream);
    }
}

uint64_t SequenceLoader::tokens_with_loss(uint64_t first_sequence, uint64_t count) const {
    if (!data_.is_examples()) return count * seq_len_;
    const PackedExamples& packed = data_.packed();
    const uint64_t end = first_sequence + count;
    uint64_t sum = 0;
    for (uint64_t i = first_sequence; i < end;)
        if (i % sequences_per_epoch_ == 0 && end - i >= sequences_per_epoch_) {  // a whole epoch
            sum += packed.with_loss();
            i += sequences_per_epoch_;
        } else {
            sum += packed.with_loss(packed_sequence(i++));
        }
    return sum;
}

void SequenceLoader::fill(uint64_t first_sequence, int rows, int32_t* inputs, int32_t* targets) {
    for (int row = 0; row < rows; row++, inputs += seq_len_, targets += seq_len_) {
        const uint64_t sequence = first_sequence + static_cast<uint64_t>(row);
        enter_epoch(sequence / sequences_per_epoch_);
        const uint64_t number = sequence % sequences_per_epoch_;
        const auto turn =
            static_cast<uint64_t>(std::upper_bound(ends_.begin(), ends_.end(), number) - ends_.begin());
        const uint64_t stream = stream_at(turn);
        const uint64_t start = window_start(stream, number - (ends_[turn] - windows(stream)));
        data_.read(stream, start, 1, inputs);
        data_.read(stream, start + 1, seq_len_, targets);
        std::copy_n(targets, seq_len_ - 1, inputs + 1);
    }
}

void SequenceLoader::fill_batch(uint64_t first_sequence, uint64_t count, std::span<int32_t> inputs,
                                std::span<int32_t> targets, std::span<int32_t> positions,
                                std::span<int32_t> ends) {
    const size_t end = static_cast<size_t>(count * seq_len_);
    assert(inputs.size() == targets.size() && end <= inputs.size() && positions.size() == ends.size());
    std::ranges::fill(inputs, 0);
    std::ranges::fill(targets, -1);
    for (size_t row = 0; row < ends.size(); row++) {
        positions[row] = 0;
        ends[row] = static_cast<int32_t>(row % seq_len_ + 1);
    }
    if (data_.is_examples()) {
        for (uint64_t i = 0; i < count; i++)
            fill_packed(first_sequence + i, i * seq_len_, inputs, targets, positions, ends);
        return data_.drop_pages();
    }
    fill(first_sequence, static_cast<int>(count), inputs.data(), targets.data());
    data_.drop_pages();
    for (size_t row = 0; row < std::min(end, ends.size()); row++) {
        positions[row] = static_cast<int32_t>(row % seq_len_);
        ends[row] = static_cast<int32_t>(seq_len_);
    }
}

uint64_t SequenceLoader::packed_sequence(uint64_t place) const {
    const uint64_t epoch = place / sequences_per_epoch_, number = place % sequences_per_epoch_;
    return shuffle_ ? Permutation(sequences_per_epoch_, random_key(seed_, epoch, 1))(number) : number;
}

void SequenceLoader::fill_packed(uint64_t place, size_t at, std::span<int32_t> inputs,
                                 std::span<int32_t> targets, std::span<int32_t> positions,
                                 std::span<int32_t> ends) const {
    const size_t begin = at;
    std::vector<int32_t> tokens;
    for (const Example& e : data_.packed().of_sequence(packed_sequence(place))) {
        data_.read(e, tokens);
        const size_t end = at - begin + e.count - 1;
        for (uint32_t i = 0; i + 1 < e.count; i++, at++) {
            inputs[at] = token_of(tokens[i]);
            targets[at] = std::max(tokens[i + 1], -1);  // -1: without a loss
            positions[at] = static_cast<int32_t>(i);
            ends[at] = static_cast<int32_t>(end);
        }
    }
}

uint64_t SequenceLoader::windows(size_t stream) const {
    const uint64_t tokens = data_.token_count(stream), begins = shuffle_ ? seq_len_ : 1;
    return std::max<uint64_t>(1, (tokens - begins) / seq_len_);
}

uint64_t SequenceLoader::stream_at(uint64_t turn) const {
    if (!shuffle_) return turn;
    return Permutation(data_.stream_count(), random_key(seed_, epoch_, 0))(turn);
}

uint64_t SequenceLoader::window_start(uint64_t stream, uint64_t place) const {
    if (!shuffle_) return place * seq_len_;
    const uint64_t key = random_key(seed_, epoch_, stream + 1);
    const bool space = data_.token_count(stream) >= 2 * seq_len_;
    const uint64_t offset = space ? random_bits_of(key, uint64_t{1} << 63) % seq_len_ : 0;
    return offset + Permutation(windows(stream), key)(place) * seq_len_;
}

void SequenceLoader::enter_epoch(uint64_t epoch) {
    if (epoch == epoch_) return;
    epoch_ = epoch;
    ends_.clear();
    uint64_t end = 0;
    for (size_t turn = 0; turn < data_.stream_count(); turn++)
        ends_.push_back(end += windows(stream_at(turn)));
}
