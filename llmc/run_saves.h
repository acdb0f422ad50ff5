// run_saves.h - the saves of a run: opens the folder, checks the room for what will be written, saves, and
// resumes from a save. It also knows which save was the last good one.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/learning_rate.h"
#include "llmc/ranks_exchange.h"
#include "llmc/metrics.h"
#include "llmc/run_model.h"
#include "llmc/save_folder.h"

class RunSaves {
  public:
    RunSaves(const RunConfig& o, RunInputs& in, RunModel& model, Metrics& metrics, Exchange& exchange)
        : o_(o), in_(in), model_(model), metrics_(metrics), exchange_(exchange) {}
    RunSaves(const RunSaves&) = delete;

    // True if the state after `step` steps was saved last.
    bool has(int64_t step) const { return saved_step_ == step; }
    // True if the run resumes a save that is in --out.
    bool goes_on_in_folder() const {
        return !in_.resumed.empty() && same_file(folder_above(in_.resumed), o_.out);
    }
    // True if --keep-best is given and the state after `step` steps has the lowest validation loss so far.
    bool is_best(int64_t step) const { return o_.keep_best && metrics_.best && metrics_.best->step == step; }
    // The save that --resume auto would continue from, for messages.
    std::string last() const {
        if (saved_step_ >= 0) return save_of(saved_step_);
        return in_.resumed.empty() ? "none" : in_.resumed;
    }
    // What --resume must name to continue from the save that was made last: the folder of saves, or the save
    // itself where the folder shows another one.
    const std::string& latest() const { return latest_; }

    // Opens the folder of saves, which the run has locked.
    void open() {
        if (!o_.rank.is_first()) return;
        folder_ = open_save_folder(o_.out, o_.keep, in_.resumed);
        if (!o_.keep_best) folder_.best.reset();
        remove_unfinished(o_.out);
        const bool is_of_adapter = file_exists(o_.out + "/adapter_config.json");
        if (!folder_.others.empty() && in_.resumed.empty() && is_of_adapter != static_cast<bool>(in_.adapter))
            fail("--out %s has the saves of %s, and this run trains %s: give another folder", o_.out,
                 is_of_adapter ? "an adapter" : "a model", in_.adapter ? "an adapter" : "a model");
        if (!folder_.others.empty())
            print(stderr,
                  "%s holds saves of another run, up to step %ld: they stay, except for steps that are "
                  "saved again, but `latest` will be this run's save%s\n",
                  o_.out, *folder_.others.rbegin(),
                  best_link().empty() || goes_on_in_folder() ? ""
                  : o_.keep_best                             ? ", and so will `best`"
                                                             : ", and the link `best` will be removed");
    }
    // Fails if what the run will save cannot be written beside what is there. If all saves are kept, they
    // need not all fit: somebody may move them.
    // `export_bytes`: the size of the file of --export; 0 without one.
    void check_room(size_t export_bytes) const {
        if (!o_.rank.is_first()) return;
        std::vector<Written> all;
        if (o_.saves()) {
            const WrittenFiles save = bytes_of_save(model_.trained(), o_.steps > 0);
            all.push_back({"--out", o_.out, "a save", save, static_cast<double>(saves_at_once())});
        }
        if (!o_.merge.empty())
            all.push_back({"--merge", o_.merge, "the merged model",
                           static_cast<size_t>(model_.whole.count()) * sizeof(floatX) +
                               128 * model_.whole.parameters().size()});
        if (export_bytes > 0) all.push_back({"--export", o_.export_file, "the file", export_bytes});
        check_disk_room(all);
        if (o_.saves()) remark_room(all[0].each.bytes);
    }

    // Reads elements of the state's buffers on the first rank. All ranks must call it for the same elements.
    ReadBuffer reader() {
        return [this](const StateBuffer& b, int64_t at, int64_t count, void* host) {
            read_slices(b, at, count, host);
        };
    }
    // Saves the state after `step` steps, which have read `sequences` sequences. `evaluated`: the validation
    // and the sample that are due at this step are done; `validated`: the validation is. All ranks must call
    // it: the first one writes, and the others send it their slices.
    void save(int64_t step, int64_t sequences, bool evaluated, bool validated) {
        metrics_.finish();
        const ReadBuffer read = reader();
        if (!o_.rank.is_first()) {
            saved_step_ = step;
            const State<floatX>& state = model_.trained();
            if (state.options.slices_blocks)
                read_all(state.layout, weight_buffers(state), read, [](const char*, size_t) {});
            return read_all(state.layout, training_buffers(state), read, [](const char*, size_t) {});
        }
        folder_.others.erase(step);
        const bool good = metrics_.is_good(), goes_on = step < o_.steps && !interrupted;
        folder_.fallback.reset();
        if (good && goes_on && folder_.good && folder_.good != step && file_exists(save_of(*folder_.good)))
            folder_.fallback = folder_.good;
        if (good) folder_.good = step;
        Progress progress{.step = step,
                          .sequences = sequences,
                          .evaluated = evaluated,
                          .validated = validated,
                          .others = folder_.others,
                          .first_loss = metrics_.first_loss,
                          .last_good = folder_.good,
                          .best = metrics_.best,
                          .data = in_.facts};
        if (step > 0)
            progress.rate = learning_rate(o_.schedule, step - 1, o_.steps, o_.warmup, o_.lr, o_.min_lr);
        remember_options(o_, progress);
        if (is_best(step)) folder_.best = step;
        save_checkpoint(folder_, model_.trained(), progress, in_.saved_tokenizer(), o_.steps > 0, in_.adapter,
                        read);
        // If this is a new run in a folder of another one, `best` is that one's.
        if (saved_step_ < 0 && !goes_on_in_folder() && !folder_.best && step_of(best_link()) >= 0)
            unlink((o_.out + "/best").c_str());
        if (good) metrics_.last_save = save_of(step);
        metrics_.judge_save = nullptr;
        if (good && goes_on)
            metrics_.judge_save = [this](const std::string& why_bad) {
                why_bad.empty() ? remove_fallback() : doubt_save(why_bad);
            };
        saved_step_ = step;
        if (is_best(step)) replace_link(step_name(step), o_.out + "/best");
        print(o_.notes(), "saved step %ld in %s\n", step, o_.out);
        const bool shows_good = folder_.shown(step) != step_name(step);
        latest_ = shows_good ? save_of(step) : o_.out;
        if (!good)
            print(stderr, "%s/%s is of a step with %s; the last good save: %s%s\n", o_.out, step_name(step),
                  metrics_.why_bad(), metrics_.last_save,
                  shows_good ? format(", which %s shows", o_.out) : "");
    }

    // The state after `step` steps was validated. If it was saved before that, its save may be the best one.
    void note_validation(int64_t step) {
        if (!o_.saves() || !o_.rank.is_first() || (step != saved_step_ && step != resumed_step_)) return;
        const std::string save = save_of(step);
        Progress progress = read_progress(save);
        progress.best = metrics_.best, progress.validated = true;
        write_progress(save, progress);
        if (!is_best(step)) return;
        folder_.best = step;
        replace_link(step_name(step), o_.out + "/best");
        if (step == saved_step_) remove_old_saves(folder_, step);
    }

    // At the end of a run: says so if an earlier state than the last one had the lowest validation loss.
    void remark_best(int64_t step) const {
        if (!o_.keep_best || !o_.rank.is_first() || !metrics_.best || metrics_.best->step == step) return;
        const bool uses_last = !o_.merge.empty() || !o_.export_file.empty();
        const std::string name = step_name(metrics_.best->step);
        print(stdout, "the lowest validation loss was %.6f, at step %ld: %s%s\n", metrics_.best->loss,
              metrics_.best->step,
              best_link() == name ? (o_.out + "/best is of that step") : "it is not saved here",
              uses_last ? ", and what is merged or exported is of the last one" : "");
    }

    // At the end of a run: says how PEFT, which does not open GGUF files, loads an adapter of one.
    void remark_loading() const {
        if (!o_.saves() || !o_.rank.is_first() || !in_.gguf || !in_.adapter) return;
        const std::string base = in_.adapter.json.value("base_model_name_or_path", "");
        if (is_hub_name(base))
            print(o_.notes(), "in Python, AutoPeftModelForCausalLM.from_pretrained(\"%s\") loads it on %s\n",
                  o_.out, base);
        else
            print(o_.notes(),
                  "in Python, PeftModel.from_pretrained(MODEL, \"%s\") loads it on %s's original\n", o_.out,
                  o_.model);
    }

    // Removes the good save that stayed in case that the weights of the last one are bad: a step has shown
    // that they are not, or none will follow.
    void remove_fallback() {
        if (!folder_.fallback) return;
        folder_.fallback.reset();
        remove_old_saves(folder_, saved_step_);
    }

    // Loads the state of training from the save that the run resumes.
    void resume() {
        load_training_state(model_.trained(), in_.resumed, in_.adapter);
        const Progress& progress = *in_.progress;
        metrics_.first_loss = progress.first_loss;
        const bool validates_alike = !o_.validates_otherwise && !in_.validates_on_other_data;
        if (validates_alike) metrics_.best = progress.best;
        const bool good = !progress.first_loss || progress.last_good == progress.step;
        const std::string last_good =
            progress.last_good ? folder_above(in_.resumed) + "/" + step_name(*progress.last_good) : "none";
        metrics_.last_save = good ? in_.resumed : last_good;
        metrics_.began_good = good;
        if (o_.saves() && goes_on_in_folder()) {
            const bool has_steps = progress.step < o_.steps;
            // Without steps left it makes the validation that an interrupted end has left out.
            const bool makes_up = validates_alike && !progress.validated && is_newest_save(progress.step);
            if (has_steps || makes_up) resumed_step_ = progress.step;
            if (has_steps && o_.keep_best && o_.rank.is_first()) show_best();
            // A run that was killed while it published its first save left no link.
            if (o_.rank.is_first() && link_target(o_.out + "/latest").empty())
                publish(o_.out, folder_.shown(progress.step));
        }
        print(stdout, "resuming %s at step %ld\n", o_.resume, progress.step);
        if (!good)
            print(stderr, "%s: step %ld was not good when it was saved; the last good save: %s\n", o_.resume,
                  progress.step, metrics_.last_save);
    }

  private:
    std::string save_of(int64_t step) const { return o_.out + "/" + step_name(step); }
    // True if the run has no later save in --out.
    bool is_newest_save(int64_t step) const {
        return std::ranges::none_of(saved_steps(o_.out), [&](int64_t other) {
            return other > step && !folder_.others.contains(other);
        });
    }
    // The name of the save that `best` leads to; "" if there is none.
    std::string best_link() const { return link_target(o_.out + "/best"); }
    // Makes `best` lead to the best save that the resumed one knows. Later ones, which it does not know, are
    // those of another way to go on.
    void show_best() const {
        const std::string link = o_.out + "/best";
        if (folder_.best && file_exists(save_of(*folder_.best)))
            replace_link(step_name(*folder_.best), link);
        else
            unlink(link.c_str());
    }
    // The first step after the last save was bad: that save is not good, and the folder shows the good one
    // before it again, if there is one.
    void doubt_save(const std::string& why_bad) {
        const std::string save = save_of(saved_step_);
        folder_.good = std::exchange(folder_.fallback, std::nullopt);
        if (folder_.good) publish(o_.out, folder_.shown(saved_step_));
        Progress progress = read_progress(save);
        progress.last_good = folder_.good;
        write_progress(save, progress);
        metrics_.last_save = folder_.good ? save_of(*folder_.good) : "none";
        print(stderr, "%s is not good, as the step after it has %s; the last good save: %s%s\n", save,
              why_bad, metrics_.last_save, folder_.good ? format(", which %s shows", o_.out) : "");
    }
    // Reads elements of a unit; the first rank gets those of the other ranks' slices from them.
    void read_slices(const StateBuffer& b, int64_t at, int64_t count, void* host) {
        b.read(at, count, host);
        if (b.slices.empty()) return;
        const State<floatX>& state = model_.trained();
        const auto& units = state.layout.units();
        const Unit& unit =
            *(std::upper_bound(units.begin(), units.end(), at,
                               [](int64_t element, const Unit& u) { return element < u.offset; }) -
              1);
        exchange_.gather_on_first([&](int rank) {
            const Slice s = state.options.slices.of(unit.size, rank);
            const int64_t first = std::max(at, unit.offset + s.first),
                          end = std::min(at + count, unit.offset + s.first + s.count);
            if (first >= end) return Part{};
            return Part{static_cast<char*>(host) + b.bytes_of(first - at), b.bytes_of(end - first)};
        });
    }
    // The number of saves that the run will make.
    int64_t planned() const {
        const int64_t steps = std::max<int64_t>(0, o_.steps - (in_.progress ? in_.progress->step : 0));
        return std::max<int64_t>(1, o_.save_every > 0 ? ceil_div(steps, o_.save_every) : 1);
    }
    // How many of them must fit beside what is there: a new save is complete before an old one is removed.
    int64_t saves_at_once() const {
        if (o_.keep == 0) return 1;
        const int64_t best = o_.keep_best && !folder_.best ? 1 : 0;
        return best + std::min(planned(), std::max<int64_t>(1, o_.keep + 1 - folder_.own_count()));
    }
    // Says so if saves that may be made would not fit: all of --keep 0, or the last good save, which stays
    // beside the newest ones if these are not good.
    void remark_room(double save_bytes) const {
        const double free = disk_of(o_.out).free;
        if (free < 0) return;
        const auto size = [](double bytes) { return size_text(static_cast<size_t>(bytes)); };
        const double all = save_bytes * static_cast<double>(planned());
        if (o_.keep == 0 && all > free)
            print(o_.notes(), "--out %s: all saves take %s, and %s are free there; --keep N keeps fewer\n",
                  o_.out, size(all), size(free));
        const double with_good = save_bytes * static_cast<double>(saves_at_once() + 1);
        if (o_.keep > 0 && planned() > o_.keep && with_good > free)
            print(o_.notes(),
                  "--out %s: if the loss goes bad, the last good save stays beside the newest: that takes "
                  "%s, and %s are free there\n",
                  o_.out, size(with_good), size(free));
    }

    const RunConfig& o_;
    RunInputs& in_;
    RunModel& model_;
    Metrics& metrics_;
    Exchange& exchange_;
    SaveFolder folder_;
    int64_t saved_step_ = -1;    // of the save that this run made last
    int64_t resumed_step_ = -1;  // of the save in --out from which this run goes on
    std::string latest_;
};
