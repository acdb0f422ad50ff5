// dataset.h - reads tokens from files and decides the order in which training sees them. The order is a pure
// function of seed and sequence number, so a resumed run needs only the number of its next sequence.
//
// There are three kinds of files. Token shards have llm.c's formats, with 16 or 32 bits per token; each shard
// is a token stream of its own. JSON lines and lists contain examples (data_files.h tells them from text),
// which a tokenizer turns into tokens (data_tokens.h) and which are packed into sequences (data_packing.h).
// Every other file is text; its tokens are its bytes, or what a tokenizer makes of it (data_tokens.h).
// Examples and texts may be compressed (data_files.h). All text files together are one stream, and so are all
// examples. Tokens are read when a sequence needs them, so there may be any number of files of any size. They
// are then dropped from the page cache, because memory plans do not count its memory.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <glob.h>
#include <sys/stat.h>

#include "llmc/data_files.h"
#include "llmc/data_packing.h"
#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/random.h"
#include "llmc/temporary_file.h"

// Expands an option's patterns (file names or glob(3) patterns) to files, sorted by bytes within each
// pattern. Fails, naming option and pattern, if a pattern matches nothing, a directory, an empty file or
// something that is not a regular file.
inline std::vector<std::string> expand_files(const std::vector<std::string>& patterns, const char* option) {
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

// A kind of token shard: int32 header[256] = {magic, version, token count, ...}, followed by the tokens.
struct ShardFormat {
    int32_t magic, version;
    size_t token_bytes;
    uint32_t limit;  // all tokens are below it
    const char* name;
};
inline constexpr ShardFormat kShardFormats[] = {
    {20240520, 1, 2, 1u << 16, "16-bit token shard"},
    {20240801, 7, 4, 1u << 31, "32-bit token shard"},
};

// Data could not be read in the middle of a run. The training up to here is good and can be saved.
struct DataError : RecoverableError {
    using RecoverableError::RecoverableError;
};

// Marks a token of an example as having no loss (sets its sign bit), and gets the token back.
inline int32_t without_loss(int32_t token) {
    return static_cast<int32_t>(static_cast<uint32_t>(token) | 1u << 31);
}
inline int32_t token_of(int32_t kept) { return kept & 0x7fffffff; }

// The token streams of one option's files. Only the places of the files' tokens are kept in memory; the
// file that was read last stays open.
class Dataset {
  public:
    // `files` as from expand_files. Fails on a damaged shard, and if the files are of several kinds.
    Dataset(const std::vector<std::string>& files, const char* option) : option_(option) {
        assert(!files.empty());
        for (const std::string& path : files) add(path);
    }

    // is_text: the files are not shards. is_examples: they are JSON examples, which count as text too.
    bool is_text() const { return !format_; }
    bool is_examples() const { return lines_; }
    // The number of examples once they are tokenized, and each example in order.
    uint64_t example_count() const {
        uint64_t sum = 0;
        for (const File& file : files_) sum += file.examples;
        return sum;
    }
    template <class Use>
    void for_each_example(Use&& use) const {
        for (const File& file : files_) index_->examples.for_each(file.first_example, file.examples, use);
        index_->examples.drop_pages();
    }
    // How many texts were longer than a sequence and continue in further examples, and how many other
    // examples were cut because they were longer.
    uint64_t texts_parted() const { return parted_; }
    uint64_t examples_cut() const { return cut_; }
    // For a line about examples that were cut: which --seq-len would cut none, if that is known, or that the
    // model, which can learn from sequences of `most`, has too few positions for that.
    std::string longer_length(int seq_len, int most) const {
        if (knows_longest_ && longest_ <= static_cast<size_t>(most) + 1)
            return format("; --seq-len %zu cuts none", longest_ - 1);
        return seq_len < most ? format("; --seq-len %d, all that the model has, cuts fewer", most)
                              : "; the model has no longer ones";
    }
    // True if each token is a byte of the text.
    bool is_bytes() const { return is_text() && !text_tokens_; }
    const std::string& option() const { return option_; }
    // Estimates the memory that the list of files takes. A file's name is counted here and in the options.
    size_t held_bytes() const {
        size_t sum = 0;
        for (const File& file : files_) sum += sizeof file + 3 * (file.path.size() + sizeof file.path);
        return sum;
    }
    // Estimates the peak of the temporary memory that reading needed for long lines and for packing. Buffers
    // of fixed size are not counted.
    size_t reading_bytes() const { return std::max(reading_bytes_, packed_ ? packed_->packing_bytes() : 0); }
    void reading_took(size_t bytes) { reading_bytes_ = std::max(reading_bytes_, bytes); }

    // The bytes of the files: of compressed texts those that they contain, of compressed examples those on
    // the disk.
    uint64_t file_bytes() const {
        uint64_t sum = 0;
        for (const File& file : files_) sum += file.is_unpacked ? file.count : file.stamp.bytes;
        return sum;
    }
    bool has_compressed_examples() const { return has_compressed_examples_; }

    size_t stream_count() const { return is_text() ? 1 : files_.size(); }
    uint64_t token_count(size_t stream) const { return is_text() ? tokens_ : files_[stream].count; }
    uint64_t token_count() const { return tokens_; }
    // True if `path` is one of the data's files.
    bool reads(const std::string& path) const {
        struct stat info;
        return stat(path.c_str(), &info) == 0 &&
               std::any_of(files_.begin(), files_.end(), [&](const File& file) {
                   return file.stamp.device == info.st_dev && file.stamp.inode == info.st_ino;
               });
    }
    // A stream's name in messages: its file, or the first of its files.
    std::string stream_name(size_t stream) const {
        if (!is_text() || files_.size() == 1) return files_[stream].path;
        return format("%s and %zu more", files_[0].path.c_str(), files_.size() - 1);
    }

    // The data's files, each once.
    std::vector<std::string> paths() const {
        std::vector<std::string> all;
        for (const File& file : files_)
            if (std::ranges::find(all, file.path) == all.end()) all.push_back(file.path);
        return all;
    }

    // Replaces a text's bytes by other tokens, all below `limit`. encode(file, put) calls put(tokens) with
    // the tokens of one file, in pieces. The tokens go to a temporary file, 2 or 4 bytes each as in shards.
    // Fails if a file changes meanwhile, or if the temporary file cannot be written.
    template <class Encode>
    void tokenize(uint32_t limit, Encode&& encode) {
        assert(is_bytes());
        const auto kept = std::make_shared<TextTokens>("the tokens of " + stream_name(0), limit);
        std::vector<File> files = std::move(files_);
        files_.clear();
        tokens_ = 0;
        for (File& file : files) {
            const FileReader& text = open_unchanged(file);
            const auto content =
                file.is_unpacked ? nullptr : unpacked(text);  // one file at a time: may be many
            const uint64_t begin = kept->count;
            encode(content ? *content : text, [&](std::span<const int32_t> tokens) { kept->append(tokens); });
            open_unchanged(file).drop_pages();
            append({std::move(file.path), file.stamp, begin, kept->count - begin});
        }
        kept->file.finish();
        text_tokens_ = kept;
        limit_ = limit;
    }

    // Reads the tokens of an example; those without a loss are marked by without_loss().
    void read(const Example& example, std::vector<int32_t>& tokens) const {
        tokens.resize(example.count);
        static_assert(sizeof(int32_t) == kExampleTokenBytes);
        try {
            text_tokens_->file.read(example.begin * kExampleTokenBytes, example.count * kExampleTokenBytes,
                                    tokens.data());
        } catch (const UserError& error) {
            throw DataError(error.what());
        }
    }

    // Turns JSON examples into tokens. encode(file, put) calls put(tokens, is_text, last) with the tokens of
    // one example; a text may come in several parts, the last of which has `last` set. An example of more
    // than seq_len + 1 tokens is cut, but a text continues in further examples, each of which begins with the
    // last token of the one before. Fails as tokenize() does, and if there is no example or no token has a
    // loss.
    template <class Encode>
    void tokenize_examples(int seq_len, int most_len, Encode&& encode) {
        assert(is_examples() && !index_);
        const size_t most = static_cast<size_t>(seq_len) + 1;
        uint64_t begin = 0, with_loss = 0;
        index_ = std::make_shared<ExampleIndex>("the examples of " + stream_name(0), seq_len);
        std::vector<uint64_t> ends;  // of each file's examples
        tokenize(kEveryNumber, [&](const FileReader& file, const auto& put) {
            const auto add = [&](std::span<const int32_t> tokens) {
                const auto learnt =
                    std::count_if(tokens.begin() + 1, tokens.end(), [](int t) { return t >= 0; });
                const auto count = static_cast<uint32_t>(tokens.size());
                index_->examples.append({begin, count, static_cast<uint32_t>(learnt)});
                index_->shortest = std::min(index_->shortest, count - 1);
                begin += count;
                with_loss += static_cast<uint64_t>(learnt);
                put(tokens);
            };
            std::vector<int32_t> rest;  // of the current text, not yet in an example
            bool parted = false;
            encode(file,
                   [&](std::span<const int32_t> tokens, bool is_text, bool last = true, size_t length = 0) {
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
        if (example_count() == 0) fail("%s: %s has no example", option_.c_str(), stream_name(0).c_str());
        if (with_loss == 0)
            fail("%s: %s: no token of %llu examples is to be learnt in sequences of %d%s", option_.c_str(),
                 stream_name(0).c_str(), static_cast<unsigned long long>(example_count()), seq_len,
                 cut_ == 0 ? ""
                           : (": what comes later is cut off" + longer_length(seq_len, most_len)).c_str());
    }

    // Gives each example a sequence of its own, instead of packing several into one.
    void keep_apart() { apart_ = true; }

    // The examples, packed into sequences.
    const PackedExamples& packed() const {
        if (!packed_)
            packed_ = std::make_shared<const PackedExamples>(
                "the examples of " + stream_name(0), static_cast<uint32_t>(index_->seq_len), index_->shortest,
                apart_, [&](const auto& use) { for_each_example(use); });
        return *packed_;
    }

    // Holds out the last tenth of each text file, or of each file's examples, rounded down, and returns it as
    // a dataset for validation. Returns null and holds out nothing if all those tenths together have fewer
    // than `least` tokens, or no token with a loss.
    std::unique_ptr<Dataset> hold_out(uint64_t least) {
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

    // Requires from here on that all tokens are below `vocab`, the size of the model's vocabulary. Checks the
    // first 512 Mi tokens now, which takes about a second, and the others when they are read. Fails naming
    // the file, the position and the token.
    void check_tokens(int vocab) {
        assert(vocab > 0);
        limit_ = static_cast<uint32_t>(vocab);
        if (token_bytes() < sizeof limit_ && limit_ >= 1u << (8 * token_bytes())) return;
        read_first_tokens([](std::span<const int32_t>) {});
    }
    // The largest token among the first 512 Mi.
    int32_t largest_token() const {
        int32_t largest = 0;
        read_first_tokens([&](std::span<const int32_t> tokens) {
            for (const int32_t token : tokens) largest = std::max(largest, token);
        });
        return largest;
    }

    // Copies tokens [first, first + count) of a stream. Fails with a DataError if a file has changed or
    // cannot be read, or if a token is outside the vocabulary.
    void read(size_t stream, uint64_t first, uint64_t count, int32_t* out) const {
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

    // Drops from the page cache what was read so far.
    void drop_pages() const {
        if (open_) open_->drop_pages();
        if (text_tokens_) text_tokens_->file.drop_pages();
        if (packed_) packed_->drop_pages();
    }

  private:
    static constexpr size_t kHeaderBytes = 256 * sizeof(int32_t);
    static constexpr uint32_t kEveryNumber = ~uint32_t{0};  // a limit that tokens marked by without_loss()
                                                            // pass too

    // A part of a stream: the tokens [begin, begin + count) of a file.
    struct File {
        std::string path;
        FileStamp stamp;        // when the file was first opened
        uint64_t begin, count;  // in tokens of the file without its header, or of text_tokens_
        uint64_t first = 0;     // position in the stream at which this part begins
        uint64_t first_example = 0, examples = 0;  // the file's part of index_->examples
        bool is_unpacked = false;  // a compressed text: `count` bytes of texts_, from texts_begin on
        uint64_t texts_begin = 0;
    };

    // The tokens of all text files, one file after the other.
    struct TextTokens {
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
    struct ExampleIndex {
        RecordFile<Example> examples;
        const int seq_len;
        uint32_t shortest = UINT32_MAX;

        ExampleIndex(std::string what, int length) : examples(std::move(what)), seq_len(length) {}
    };
    static constexpr size_t kExampleTokenBytes = 4;  // wide enough for without_loss()

    explicit Dataset(const std::string& option) : option_(option) {}

    size_t token_bytes() const {
        return format_ ? format_->token_bytes : text_tokens_ ? text_tokens_->token_bytes : 1;
    }

    template <class Use>
    void read_first_tokens(Use&& use) const {
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

    // The last tenth of a file: how many tokens and examples it has.
    struct Tenth {
        uint64_t tokens, examples;
    };
    // Adds the number of its tokens that have a loss to `learnt`.
    Tenth last_tenth(const File& file, uint64_t& learnt) const {
        if (!lines_) return {file.count / 10, 0};
        Tenth tenth{0, file.examples / 10};
        index_->examples.for_each(file.first_example + file.examples - tenth.examples, tenth.examples,
                                  [&](const Example& e) {
                                      tenth.tokens += e.count;
                                      learnt += e.with_loss;
                                  });
        return tenth;
    }

    void append(File file) {
        file.first = is_text() ? tokens_ : 0;
        tokens_ += file.count;
        files_.push_back(std::move(file));
    }

    void add(const std::string& path) {
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
        const bool lines = !format && data_kind(path, start_of_data(file, kDataStart)) != DataKind::Text;
        const bool compressed = !format && is_gzip(file);
        if (compressed && name_extension(path) == "bin")
            fail("%s is a compressed token shard: unpack it first", path.c_str());
        if (lines && compressed) has_compressed_examples_ = true;
        if (files_.empty()) format_ = format, lines_ = lines;
        const auto kind = [](const ShardFormat* f, bool is_lines) {
            return f ? f->name : is_lines ? "file of examples in JSON" : "text";
        };
        if (format != format_ || lines != lines_)
            fail("%s: %s is a %s and %s a %s; give files of one kind", option_.c_str(),
                 files_[0].path.c_str(), kind(format_, lines_), path.c_str(), kind(format, lines));
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

    // The number of tokens in a shard of `file_bytes` bytes; fails if it is damaged.
    static uint64_t check_shard(const std::string& file, uint64_t file_bytes, const int32_t* header,
                                const ShardFormat* format) {
        const char* path = file.c_str();
        const auto size = static_cast<unsigned long long>(file_bytes);
        if (size < kHeaderBytes)
            fail("%s: %llu bytes are too few for a token shard, whose header alone has %zu", path, size,
                 kHeaderBytes);
        if (!format)
            fail("%s is not a token shard: it starts with %d where %d or %d belongs", path, header[0],
                 kShardFormats[0].magic, kShardFormats[1].magic);
        if (header[1] != format->version)
            fail("%s: %s of version %d where %d is needed", path, format->name, header[1], format->version);
        if (header[2] < 1 || size - kHeaderBytes != format->token_bytes * static_cast<uint64_t>(header[2]))
            fail("%s: its header promises %d tokens of %zu bytes and %llu bytes follow", path, header[2],
                 format->token_bytes, size - kHeaderBytes);
        return static_cast<uint64_t>(header[2]);
    }

    // Opens the file if it is not open. Fails if it has changed since the run began.
    const FileReader& open_unchanged(const File& file) const {
        if (!open_ || open_->path() != file.path) {
            if (open_) open_->drop_pages();
            open_ = file.is_unpacked ? texts_->part(file.path, file.texts_begin, file.count)
                                     : std::make_unique<const FileReader>(file.path, Pages::Dropped);
        }
        if (file.is_unpacked) return *open_;
        if (open_->stamp() != file.stamp)
            fail("%s was written to or replaced since the run began, and had %llu bytes then",
                 file.path.c_str(), static_cast<unsigned long long>(file.stamp.bytes));
        return *open_;
    }

    template <class Token>
    static void widen(const unsigned char* bytes, size_t count, int32_t* out) {
        for (size_t i = 0; i < count; i++) {
            Token token;
            std::memcpy(&token, bytes + i * sizeof token, sizeof token);
            out[i] = static_cast<int32_t>(token);
        }
    }

    // Reads from an open file. If the read fails because the file changed, fails as open_unchanged() does.
    void read_unchanged(const File& file, const FileReader& input, uint64_t at, size_t bytes,
                        void* out) const {
        try {
            input.read(at, bytes, out);
        } catch (const UserError&) {
            open_unchanged(file);
            throw;
        }
    }

    // Reads tokens [first, first + count) of a File.
    void read_file(const File& file, uint64_t first, uint64_t count, int32_t* out) const {
        const FileReader* input = text_tokens_ ? nullptr : &open_unchanged(file);
        unsigned char bytes[1 << 14];
        const size_t width = token_bytes(), header = is_text() ? 0 : kHeaderBytes;
        for (uint64_t n; count > 0; first += n, out += n, count -= n) {
            n = std::min<uint64_t>(count, sizeof bytes / width);
            const uint64_t at = header + (file.begin + first) * width;
            if (input)
                read_unchanged(file, *input, at, n * width, bytes);
            else
                text_tokens_->file.read(at, n * width, bytes);
            if (width == 1) widen<uint8_t>(bytes, n, out);
            if (width == 2) widen<uint16_t>(bytes, n, out);
            if (width == 4) widen<uint32_t>(bytes, n, out);
            check(file, first, n, out);
        }
    }

    void check(const File& file, uint64_t first, uint64_t count, const int32_t* tokens) const {
        uint32_t largest = 0;  // a loop without an early exit can be vectorized
        for (uint64_t i = 0; i < count; i++) largest = std::max(largest, static_cast<uint32_t>(tokens[i]));
        if (largest < limit_) return;
        const auto outside = [&](int32_t token) { return static_cast<uint32_t>(token) >= limit_; };
        const int32_t* bad = std::find_if(tokens, tokens + count, outside);
        const auto position = file.begin + first + static_cast<uint64_t>(bad - tokens);
        fail("%s: token %u at position %llu is not below the vocabulary size %u", file.path.c_str(),
             static_cast<uint32_t>(*bad), static_cast<unsigned long long>(position), limit_);
    }

    std::string option_;
    const ShardFormat* format_ = nullptr;  // null: text
    bool lines_ = false;                   // JSON lines
    bool has_compressed_examples_ = false;
    std::shared_ptr<ExampleIndex> index_;  // of the examples, once they are tokenized
    mutable std::shared_ptr<const PackedExamples> packed_;
    size_t reading_bytes_ = 0;
    size_t longest_ = 0;
    bool knows_longest_ = true;
    uint64_t parted_ = 0, cut_ = 0;                  // texts continued, and examples cut, because they were
                                                     // too long
    bool apart_ = false;                             // one example per sequence
    std::shared_ptr<const TextTokens> text_tokens_;  // null: tokens are the text's bytes
    std::vector<File> files_;                        // all of one stream for text; each shard is its own
                                                     // stream
    uint64_t tokens_ = 0;
    uint32_t limit_ = 256;
    mutable std::unique_ptr<const FileReader> open_;  // the file read last
    std::shared_ptr<TemporaryFile> texts_;            // what compressed texts contain, one after another
    uint64_t texts_bytes_ = 0;
};

// Deals a dataset out as sequences of T inputs and their T targets, which are the inputs' successors.
// Sequences are numbered through all epochs. dev/reference.py computes the same order:
//
//   A stream of n >= T + 1 tokens has max(1, (n - T) / T) windows with shuffling, and (n - 1) / T without it.
//   The windows of all streams are the S sequences of an epoch. Sequence q is number q % S of epoch e = q /
//   S: the epoch goes through the streams in an order of its own, and through each stream's windows in an
//   order of their own. Window w starts at token offset + w * T. With shuffling, K(g) = random_key(seed, e,
//   g): the i-th of F streams is f = Permutation(F, K(0))(i), the j-th of its W windows is Permutation(W, K(f
//   + 1))(j), and offset is random_bits_of(K(f + 1), 2^63) % T, or 0 if n < 2 T. Without shuffling, streams
//   and windows are in their given order and offset is 0.
//
//   Examples are packed in the order of the data, the same way in each epoch. An example of n tokens takes n
//   - 1 rows; the unused rest of a sequence is padding without a loss. With shuffling, the j-th of an epoch's
//   S sequences is Permutation(S, K(1))(j).
class SequenceLoader {
  public:
    // The dataset must outlive the loader and stay where it is. Fails if a stream is shorter than T + 1
    // tokens. Examples must already be tokenized for this T.
    SequenceLoader(const Dataset& data, int seq_len, uint64_t seed, bool shuffle)
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
                    "%s: %s has %llu tokens, and sequences of %d need %d; use longer files or shorter "
                    "sequences",
                    data.option().c_str(), data.stream_name(stream).c_str(),
                    static_cast<unsigned long long>(tokens), seq_len, seq_len + 1);
            sequences_per_epoch_ += windows(stream);
        }
    }

    uint64_t sequences_per_epoch() const { return sequences_per_epoch_; }
    // How many targets of these sequences have a loss.
    uint64_t tokens_with_loss(uint64_t first_sequence, uint64_t count) const {
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
    // padding: the share of an epoch's positions that hold no example. attended: the length of a token's
    // example, averaged over all positions; the cost of attention is proportional to it.
    double padding() const { return data_.is_examples() ? data_.packed().padding() : 0; }
    double attended() const {
        return data_.is_examples() ? data_.packed().attended() : static_cast<double>(seq_len_);
    }

    // Writes the sequences first_sequence ... first_sequence + rows - 1 to inputs (rows, T) and targets
    // (rows, T). The result depends only on the arguments. Fails as Dataset::read does.
    void fill(uint64_t first_sequence, int rows, int32_t* inputs, int32_t* targets) {
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

    // Fills a whole batch, whose first `count` sequences are real; the targets of the others are -1 and have
    // no loss. Writes positions and ends (rows.h) if the batch has them. Each padding token is a
    // document of its own, which costs attention least.
    void fill_batch(uint64_t first_sequence, uint64_t count, std::span<int32_t> inputs,
                    std::span<int32_t> targets, std::span<int32_t> positions = {},
                    std::span<int32_t> ends = {}) {
        const size_t end = static_cast<size_t>(count * seq_len_);
        assert(inputs.size() == targets.size() && end <= inputs.size() && positions.size() == ends.size());
        std::fill(inputs.begin(), inputs.end(), 0);
        std::fill(targets.begin(), targets.end(), -1);
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

  private:
    // The packed sequence that comes at `place`, counted through all epochs.
    uint64_t packed_sequence(uint64_t place) const {
        const uint64_t epoch = place / sequences_per_epoch_, number = place % sequences_per_epoch_;
        return shuffle_ ? Permutation(sequences_per_epoch_, random_key(seed_, epoch, 1))(number) : number;
    }

    // Writes a packed sequence to the rows that begin at `at`.
    void fill_packed(uint64_t place, size_t at, std::span<int32_t> inputs, std::span<int32_t> targets,
                     std::span<int32_t> positions, std::span<int32_t> ends) const {
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

    // How many sequences an epoch reads of a stream. Those of training begin anywhere in its first seq_len
    // tokens, those of a validation at the first.
    uint64_t windows(size_t stream) const {
        const uint64_t tokens = data_.token_count(stream), begins = shuffle_ ? seq_len_ : 1;
        return std::max<uint64_t>(1, (tokens - begins) / seq_len_);
    }

    // The stream that the epoch reads as its number `turn`.
    uint64_t stream_at(uint64_t turn) const {
        if (!shuffle_) return turn;
        return Permutation(data_.stream_count(), random_key(seed_, epoch_, 0))(turn);
    }

    // The token at which the stream's window number `place` in this epoch starts.
    uint64_t window_start(uint64_t stream, uint64_t place) const {
        if (!shuffle_) return place * seq_len_;
        const uint64_t key = random_key(seed_, epoch_, stream + 1);
        const bool space = data_.token_count(stream) >= 2 * seq_len_;
        const uint64_t offset = space ? random_bits_of(key, uint64_t{1} << 63) % seq_len_ : 0;
        return offset + Permutation(windows(stream), key)(place) * seq_len_;
    }

    void enter_epoch(uint64_t epoch) {
        if (epoch == epoch_) return;
        epoch_ = epoch;
        ends_.clear();
        uint64_t end = 0;
        for (size_t turn = 0; turn < data_.stream_count(); turn++)
            ends_.push_back(end += windows(stream_at(turn)));
    }

    const Dataset& data_;
    const uint64_t seq_len_, seed_;
    const bool shuffle_;
    uint64_t sequences_per_epoch_ = 0;
    uint64_t epoch_ = ~uint64_t{0};  // of the last sequence that was read
    std::vector<uint64_t> ends_;     // the sequence number at which each stream ends in it, by turns
};
